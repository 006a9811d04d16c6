"""The affine relation of two aligned images, channel by channel."""

from __future__ import annotations

import itertools
import math

import numpy as np

from rewriter.data.parity.layouts import MOST_CHANNELS
from rewriter.data.parity.scales import Fit
from rewriter.model import Array

BLOCK = 8
"""Side of the blocks whose means are fitted: an interpolation changes what is smaller than its kernel,
not the mean of 64 pixels. A fit of single pixels would find too small a factor (regression dilution)."""

OUTLIERS = 6.0
"""Deviations, estimated from the median, from which a pixel (clipped, or from a border) has no say."""

ALIKE = 1.1
"""Ratio of unexplained variances up to which the usual order of channels wins over a better one."""

NOISE = 1e-7
"""Unexplained share of the variance that float32 arithmetic explains."""


def fit(ours: Array, theirs: Array) -> Fit | None:
    """The channel order and the affine relation, [N, C, H, W] both; None if there is none to find."""
    if min(ours.shape) == 0:
        return None
    mine, other = (_flattened(a) for a in (ours, theirs))
    if not (np.isfinite(mine).all() and np.isfinite(other).all()):
        return None
    order = _order(mine, other)
    blocks = _block_means(ours), _block_means(theirs)
    factor, offset = np.ones(len(order)), np.zeros(len(order))
    left = total = 0.0
    for channel, source in enumerate(order):
        factor[channel], offset[channel] = _line(mine[source], other[channel])
        rest = mine[source] * factor[channel] + offset[channel] - other[channel]
        if _share(_trimmed(rest), other[channel]) > 1e-5 and blocks[0].shape[1] >= 64:
            factor[channel], offset[channel] = _line(blocks[0][source], blocks[1][channel])
            rest = mine[source] * factor[channel] + offset[channel] - other[channel]
        left += float(np.mean(_trimmed(rest) ** 2)) / (float(np.var(other[channel])) or 1.0)
        total += 1.0
    return Fit(order, factor, offset, left / total)


def _share(rest: Array, values: Array) -> float:
    return float(np.mean(rest**2)) / (float(np.var(values)) or 1.0)


def _trimmed(rest: Array) -> Array:
    """Without the largest hundredth: clipped pixels and edges of a border."""
    cut = max(1, len(rest) // 100)
    if len(rest) <= cut:
        return rest
    return np.asarray(rest[np.argpartition(np.abs(rest), len(rest) - cut)[:-cut]])


def _flattened(images: Array) -> Array:
    """[channels, pixels] in float64."""
    return images.swapaxes(0, 1).reshape(images.shape[1], -1).astype(np.float64)


def _block_means(images: Array) -> Array:
    count, channels, height, width = images.shape
    rows, columns = height // BLOCK, width // BLOCK
    cut = images[..., : rows * BLOCK, : columns * BLOCK].astype(np.float64)
    means = cut.reshape(count, channels, rows, BLOCK, columns, BLOCK).mean(axis=(3, 5))
    return np.asarray(means.swapaxes(0, 1).reshape(channels, -1))


def _order(mine: Array, other: Array) -> tuple[int, ...]:
    """Our channel for each of theirs; as they stand where another order explains no more."""
    count = len(mine)
    same = tuple(range(count))
    if not 1 < count <= MOST_CHANNELS:
        return same
    left = _unexplained(mine, other)
    costs = {o: sum(left[c, source] for c, source in enumerate(o)) for o in itertools.permutations(same)}
    allowed = ALIKE * min(costs.values()) + NOISE * count
    usual = (same, (2, 1, 0, *same[3:])) if count >= 3 else (same,)
    return next((o for o in usual if costs[o] <= allowed), min(costs, key=lambda o: costs[o]))


def _unexplained(mine: Array, other: Array) -> Array:
    """[theirs, ours]: share of the variance of a channel that a line through another leaves over."""
    parts = []
    for side in (mine, other):
        centred = side - side.mean(axis=1, keepdims=True)
        norm = np.linalg.norm(centred, axis=1, keepdims=True)
        parts.append(centred / np.where(norm > 0, norm, 1.0))
    a, b = parts
    found = 1.0 - (b @ a.T) ** 2
    flat = [np.ptp(side, axis=1) == 0 for side in (mine, other)]
    found[np.ix_(flat[1], flat[0])] = 0.0  # a constant explains a constant
    return np.asarray(np.maximum(found, 0.0))


def _line(x: Array, y: Array) -> tuple[float, float]:
    """Least squares for y = a x + b without the outliers; a = 1 where x does not vary."""
    use = np.ones(len(x), bool)
    a, b = 1.0, 0.0
    for _ in range(3):
        a, b = _least_squares(x[use], y[use])
        rest = np.abs(y - (a * x + b))
        scale = 1.4826 * float(np.median(rest))  # of a normal distribution
        floor = 1e-6 * (float(np.ptp(y)) or 1.0)
        kept = rest <= max(OUTLIERS * scale, floor)
        if np.array_equal(kept, use) or kept.sum() < len(x) // 4:
            break
        use = kept
    return a, b


def _least_squares(x: Array, y: Array) -> tuple[float, float]:
    x_mean, y_mean = float(x.mean()), float(y.mean())
    centred = x - x_mean
    square = float(centred @ centred)
    a = float(centred @ (y - y_mean)) / square if square > 0 else 1.0
    if not math.isfinite(a) or (square > 0 and a == 0.0):
        a = 1.0 if not math.isfinite(a) else 0.0
    return a, y_mean - a * x_mean
