"""Which rows of a tensor are looked at: a seeded choice that is spread evenly."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from rewriter.model import Array
from rewriter.rewriting.rounding.layers import Window

FRACTIONS = 2**20
"""Steps of the random offsets between evenly spaced rows."""


@dataclass(frozen=True)
class Taps:
    """What the windows of a Conv read at the chosen output positions.

    Attributes:
        indices: Into the flattened spatial axes, int64 [positions, taps]; outside, the nearest one.
        outside: Whether a tap reads padding, bool [positions, taps].
    """

    indices: Array
    outside: Array


def offsets(seed: int, most: int) -> Array:
    """Where in its part each of at most `most` rows lies, int64 below `FRACTIONS`."""
    return np.random.default_rng(seed).integers(FRACTIONS, size=most)


def spread(total: int, limit: int, offsets: Array) -> Array:
    """At most `limit` of `total` indices, one at random in each of as many equal parts; int64, ascending."""
    count = min(total, limit)
    inside = offsets[:count] * total // FRACTIONS
    found: Array = (np.arange(count) * total + inside) // max(count, 1)
    return found


def windows(window: Window, sizes: tuple[int, ...], limit: int, offsets: Array) -> Taps:
    """The taps of at most `limit` windows on an image of those sizes."""
    axes = len(sizes)
    counts = [_positions(window, axis, size) for axis, size in enumerate(sizes)]
    chosen = np.unravel_index(spread(prod(counts), limit, offsets), [max(count, 1) for count in counts])
    steps = np.indices(window.kernel).reshape(axes, -1)
    places = [
        place[:, np.newaxis] * window.strides[axis] + steps[axis] * window.dilations[axis] - window.pads[axis]
        for axis, place in enumerate(chosen)
    ]
    indices, outside = np.zeros_like(places[0]), np.zeros(places[0].shape, bool)
    for place, size in zip(places, sizes, strict=True):
        outside |= (place < 0) | (place >= size)
        indices = indices * size + np.clip(place, 0, size - 1)
    return Taps(indices, outside)


def _positions(window: Window, axis: int, size: int) -> int:
    """Output positions along an axis."""
    padded = size + window.pads[axis] + window.pads[axis + len(window.kernel)]
    span = (window.kernel[axis] - 1) * window.dilations[axis] + 1
    return max(0, (padded - span) // window.strides[axis] + 1)
