"""Relates two arrays of images of one size: layout, order of channels and scale, found together.

A line is fitted to each channel where both have content. Of explanations that fit equally well, the simplest
wins.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from rewriter.ir.model import Array
from rewriter.parity.scales import Fit

MOST_CHANNELS = 4
"""Channels of RGBA: an axis of at most this length counts as the axis of channels."""

LEAST_SIDE = 8
"""Shortest height or width: fewer pixels do not tell one relation from another."""

RELATED = 0.3
"""Largest unexplained share of the variance between two versions of one image. Unrelated photographs leave
more than 0.8; another interpolation leaves less than 0.1."""

SIMPLER = 1.2
"""Ratio of unexplained variances up to which the simpler of two explanations wins."""

SAMPLE = 4
"""Images of a batch that the search uses; its result is measured on all of them."""

BLOCK = 8
"""Side of the blocks whose means are fitted: an interpolation changes details smaller than its kernel, not
the mean of 64 pixels. A fit of single pixels would find too small a factor (regression dilution)."""

NOISE = 1e-7
"""Unexplained share of the variance that float32 arithmetic explains."""

Window = tuple[slice, slice]
"""Rows and columns."""


@dataclass(frozen=True)
class Relation:
    """How theirs comes from ours; `axes` are the layouts of ours and theirs, as letters N, C, H, W."""

    axes: tuple[str, str]
    fit: Fit

    @property
    def changes(self) -> tuple[bool, bool, float]:
        """The order of explanations that fit equally well, the simplest first."""
        return self.axes[0] != self.axes[1], not self.fit.in_order, self.fit.unexplained

    def sides(self, ours: Array, theirs: Array) -> tuple[Array, Array]:
        """Both as [N, C, H, W]."""
        return canonical(ours, self.axes[0]), canonical(theirs, self.axes[1])


def relation(ours: Array, theirs: Array) -> Relation | None:
    """The simplest good relation; None if they are no images, differ in size, or show different things."""
    relations = []
    for axes in axes_pairs(ours.shape, theirs.shape):
        sides = [
            canonical(a, x)[:SAMPLE].astype(np.float64) for a, x in zip((ours, theirs), axes, strict=True)
        ]
        if sides[0].shape == sides[1].shape and all(np.isfinite(side).all() for side in sides):
            window = common(*sides)
            relations.append(Relation(axes, fitted(*(side[..., *window] for side in sides))))
    least = min((r.fit.unexplained for r in relations), default=1.0)
    good = [r for r in relations if r.fit.unexplained <= SIMPLER * least + NOISE]
    return min(good, key=lambda r: r.changes) if least <= RELATED else None


# -- layouts ------------------------------------------------------------------------------------


def axes_pairs(ours: tuple[int, ...], theirs: tuple[int, ...]) -> list[tuple[str, str]]:
    """Layouts of both shapes in which batch and channels agree, equal layouts first."""
    pairs = [
        (mine, other)
        for mine, other in itertools.product(layouts(ours), layouts(theirs))
        if all(_size(ours, mine, letter) == _size(theirs, other, letter) for letter in "NC")
    ]
    return sorted(pairs, key=lambda pair: pair[0] != pair[1])


def _size(shape: tuple[int, ...], axes: str, letter: str) -> int:
    return shape[axes.index(letter)] if letter in axes else 1


def layouts(shape: tuple[int, ...]) -> list[str]:
    """Possible layouts of images of this shape, the usual one first."""
    usual = {4: ["NCHW", "NHWC"], 3: ["CHW", "HWC"], 2: ["HW"]}.get(len(shape), [])
    images = [axes for axes in usual if "C" not in axes or shape[axes.index("C")] <= MOST_CHANNELS]
    images = images or usual[:1] * (len(shape) == 4)
    return [axes for axes in images if min(shape[axes.index("H")], shape[axes.index("W")]) >= LEAST_SIDE]


def canonical(array: Array, axes: str) -> Array:
    """The array as [N, C, H, W], a view; missing axes have size 1."""
    moved = array.transpose([axes.index(letter) for letter in "NCHW" if letter in axes])
    return moved[tuple(slice(None) if letter in axes else None for letter in "NCHW")]


def content(images: Array) -> Window:
    """The window of images [N, C, H, W] without borders that have one value per channel in all of them."""
    after = (images != images[..., :1, :1]).any(axis=(0, 1))
    before = (images != images[..., -1:, -1:]).any(axis=(0, 1))
    if not (after.any() and before.any()):
        return whole(images)
    (top, left), (bottom, right) = np.argwhere(after).min(axis=0), np.argwhere(before).max(axis=0) + 1
    return slice(int(top), int(bottom)), slice(int(left), int(right))


def whole(images: Array) -> Window:
    """The window of all pixels."""
    return slice(0, images.shape[-2]), slice(0, images.shape[-1])


def extent(window: Window) -> tuple[int, int]:
    """Height and width."""
    return window[0].stop - window[0].start, window[1].stop - window[1].start


def common(ours: Array, theirs: Array) -> Window:
    """The window in which both have content; all of both if there is none."""
    spans = []
    for mine, other in zip(content(ours), content(theirs), strict=True):
        spans.append(slice(max(mine.start, other.start), min(mine.stop, other.stop)))
    return (spans[0], spans[1]) if min(extent((spans[0], spans[1]))) > 0 else whole(ours)


def standard(rows: Array) -> Array:
    """The rows at mean 0 and deviation 1; rows of one value at 0."""
    deviation = rows.std(axis=1, keepdims=True)
    return np.asarray((rows - rows.mean(axis=1, keepdims=True)) / np.where(deviation > 0, deviation, 1.0))


# -- the affine relation of two aligned images, channel by channel ------------------------------


def fitted(ours: Array, theirs: Array) -> Fit:
    """The channel order and affine relation of two [N, C, H, W] of one size."""
    mine, other = (side.swapaxes(0, 1).reshape(side.shape[1], -1) for side in (ours, theirs))
    order = _order(mine, other)
    blocks = [_block_means(side) for side in (ours, theirs)]
    lines, left = [], 0.0
    for channel, source in enumerate(order):
        line, share = _line(mine[source], other[channel])
        if share > 1e-5 and blocks[0].shape[1] >= 64:
            line, share = _line(blocks[0][source], blocks[1][channel])
        lines.append(line)
        left += share / len(order)
    factor, offset = np.array(lines).T
    return Fit(order, factor, offset, left)


def _block_means(images: Array) -> Array:
    count, channels, height, width = images.shape
    rows, columns = height // BLOCK, width // BLOCK
    cut = images[..., : rows * BLOCK, : columns * BLOCK]
    means = cut.reshape(count, channels, rows, BLOCK, columns, BLOCK).mean(axis=(3, 5))
    return np.asarray(means.swapaxes(0, 1).reshape(channels, -1))


def _order(mine: Array, other: Array) -> tuple[int, ...]:
    """Our channel for each of theirs; unchanged if no other order explains more."""
    count = len(mine)
    same = tuple(range(count))
    if not 1 < count <= MOST_CHANNELS:
        return same
    left = np.maximum(1.0 - (standard(other) @ standard(mine).T / mine.shape[1]) ** 2, 0.0)
    left[np.ix_(np.ptp(other, axis=1) == 0, np.ptp(mine, axis=1) == 0)] = 0.0  # a constant explains one
    costs = {o: sum(left[c, source] for c, source in enumerate(o)) for o in itertools.permutations(same)}
    allowed = 1.1 * min(costs.values()) + NOISE * count
    usual = (same, (2, 1, 0, *same[3:])) if count >= 3 else (same,)
    return next((o for o in usual if costs[o] <= allowed), min(costs, key=lambda o: costs[o]))


def _line(x: Array, y: Array) -> tuple[tuple[float, float], float]:
    """Least squares for y = a x + b without outliers (clipped, or from a border); a = 1 if x is constant.

    Also returns the share of the variance of y that the line leaves, without the largest hundredth.
    """
    use = np.ones(len(x), bool)
    a, b = 1.0, 0.0
    for _ in range(3):
        mean = x[use].mean(), y[use].mean()
        square = float(np.sum((x[use] - mean[0]) ** 2))
        a = float((x[use] - mean[0]) @ (y[use] - mean[1])) / square if square > 0 else 1.0
        b = float(mean[1] - a * mean[0])
        rest = np.abs(y - (a * x + b))
        close = rest <= max(6 * 1.4826 * float(np.median(rest)), 1e-6 * (float(np.ptp(y)) or 1.0))
        if np.array_equal(close, use) or close.sum() < len(x) // 4:
            break
        use = close
    squares = np.sort((a * x + b - y) ** 2)[: len(x) - max(1, len(x) // 100)]
    return (a, b), float(np.mean(squares)) / (float(np.var(y)) or 1.0) if squares.size else 0.0
