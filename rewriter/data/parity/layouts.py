"""Which axes of an array are batch, channels, height and width."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rewriter.model import Array

MOST_CHANNELS = 4
"""Grey, RGB, RGBA: an axis of an image that is this short is one of channels."""

LEAST_SIDE = 8
"""Below that there are too few pixels to tell one relation from another."""

_CANDIDATES = {4: ("NCHW", "NHWC"), 3: ("CHW", "HWC", "NHW"), 2: ("HW",)}


@dataclass(frozen=True)
class Layout:
    """The axes of an image, a letter each: N, C, H, W."""

    axes: str

    def axis(self, letter: str) -> int | None:
        """Position of an axis; None if the array has none such."""
        return self.axes.index(letter) if letter in self.axes else None

    def canonical(self, array: Array) -> Array:
        """The array as [N, C, H, W], a view; missing axes have size 1."""
        present = [letter for letter in "NCHW" if letter in self.axes]
        moved = array.transpose([self.axes.index(letter) for letter in present])
        index = tuple(slice(None) if letter in present else np.newaxis for letter in "NCHW")
        return moved[index]


def layouts(shape: tuple[int, ...]) -> Iterator[Layout]:
    """The layouts that an image of this shape may have, the usual one first."""
    found = [Layout(axes) for axes in _CANDIDATES.get(len(shape), ()) if _possible(axes, shape)]
    if not found and len(shape) == 4:
        found = [Layout("NCHW")]
    yield from (layout for layout in found if _side(layout, shape) >= LEAST_SIDE)


def _possible(axes: str, shape: tuple[int, ...]) -> bool:
    if axes == "NHW":  # many planes without channels: neither end is one of channels
        return min(shape[0], shape[2]) > MOST_CHANNELS
    return "C" not in axes or shape[axes.index("C")] <= MOST_CHANNELS


def _side(layout: Layout, shape: tuple[int, ...]) -> int:
    return min(shape[layout.axes.index(letter)] for letter in "HW")


def layout_pairs(ours: tuple[int, ...], theirs: tuple[int, ...]) -> list[tuple[Layout, Layout]]:
    """Layouts of both arrays in which batch and channels agree, equal layouts first."""
    found = []
    for mine in layouts(ours):
        for other in layouts(theirs):
            sizes = [
                {letter: shape[axes.index(letter)] for letter in "NC" if letter in axes}
                for axes, shape in ((mine.axes, ours), (other.axes, theirs))
            ]
            if all(sizes[0].get(letter, 1) == sizes[1].get(letter, 1) for letter in "NC"):
                found.append((mine, other))
    return sorted(found, key=lambda pair: pair[0] != pair[1])
