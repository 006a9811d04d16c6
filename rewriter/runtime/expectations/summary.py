"""Summary of one sample of one input in a few numbers, so that one sample is in memory at a time."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from rewriter.ir.model import Array


@dataclass(frozen=True)
class Summary:
    """Statistics of the finite values of an array; 0 if there are none.

    Attributes:
        mean, deviation: Per channel, or of all values (size 1) without a channel axis.
        levels: The distinct values if there are at most three.
        negative_infinite: The number of values that are -infinity, which masks use.
        digest: A hash of the array.
    """

    shape: tuple[int, ...]
    size: int
    low: float
    high: float
    mean: Array
    deviation: Array
    levels: tuple[float, ...] | None
    not_finite: int
    negative_infinite: int
    digest: str


def summarize(array: Array, channel_axis: int | None) -> Summary:
    """Summarizes an array of any real element type."""
    values = array.astype(np.float64)
    finite = np.isfinite(values)
    usable = values[finite]
    axis = channel_axis if channel_axis is not None and channel_axis < values.ndim else None
    channels = values[np.newaxis] if axis is None else np.moveaxis(values, axis, 0)
    rows = channels.reshape(len(channels), -1)
    clean = np.where(np.isfinite(rows), rows, 0.0)
    few = np.unique(usable[:4096])
    levels = tuple(np.unique(usable).tolist()) if few.size <= 3 else None
    return Summary(
        values.shape,
        values.size,
        float(usable.min()) if usable.size else 0.0,
        float(usable.max()) if usable.size else 0.0,
        clean.mean(axis=1) if clean.size else np.zeros(1),
        clean.std(axis=1) if clean.size else np.zeros(1),
        levels if levels is not None and len(levels) <= 3 else None,
        int(values.size - usable.size),
        int(np.isneginf(values).sum()),
        hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest(),
    )
