"""Moves of a state from call to call, as the recorder and the measured ranges count them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rewriter.ir.model import Array

LAST_PLACE = 2.0**-10.5
"""FP16's last place relative to a number, the geometric mean over a binade."""

LEAST_NORMAL = 2.0**-14
"""Smaller numbers of FP16 have its last place."""

AT_REST = 2.0**-7
"""Least median step, in last places: a state that stays where it began moves by FP32's rounding, 2^-13."""

EDGES: Array = np.concatenate([2.0 ** np.arange(-8, 12.5, 0.5), [1e30]])
"""Limits of steps in last places."""

SAMPLED = 4096
"""Elements of a state, or of a sequence of states, that are looked at."""


def sampled(array: Array) -> Array:
    """At most `SAMPLED` elements of an array, flat; the stride is odd, to meet every unit of 2^k."""
    flat = array.reshape(-1)
    return flat if flat.size <= SAMPLED else flat[:: flat.size // (2 * SAMPLED) * 2 + 1]


def ways(before: Array, after: Array) -> Array:
    """The way between two states in steps below each of `EDGES`, from elements of both, flat."""
    moves = np.abs(after - before)
    unit = np.maximum(np.maximum(np.abs(before), np.abs(after)), LEAST_NORMAL) * LAST_PLACE
    edges = np.minimum(np.searchsorted(EDGES, moves / unit, "right"), len(EDGES) - 1)
    return np.bincount(edges, moves, len(EDGES)).cumsum()


def median_step(below: Sequence[float] | Array) -> float | None:
    """The median step, weighted by the way; None if nothing moves, or not to a finite value.

    Args:
        below: The way in steps below each of `EDGES`.
    """
    total: Any = below[-1]
    step = float(np.interp(total / 2, below[:-1], EDGES[:-1])) if 0 < total < np.inf else 0.0
    return step if step >= AT_REST else None
