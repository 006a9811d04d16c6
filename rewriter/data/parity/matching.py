"""Relates two arrays of images: layout, orientation, shift, channels and scale, found together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rewriter.data.parity.geometry import (
    LEAST_OVERLAP,
    MOST_CHANNELS,
    Box,
    Layout,
    Placement,
    content,
    layout_pairs,
    placements,
    standard,
)
from rewriter.data.parity.resampling import METHODS, resize
from rewriter.data.parity.scales import Fit, Scaling, named_pair, own_constants
from rewriter.model import Array

RELATED = 0.3
"""Largest unexplained share of the variance between two versions of one image. Unrelated photographs leave
more than 0.8; another interpolation leaves less than 0.1."""

SIMPLER = 1.2
"""Ratio of unexplained variances up to which the simpler of two explanations wins."""

LOOKED_AT = 6
"""Placements that are fitted with all pixels, the best ones by a part of the pixels."""

PIXELS = 20_000
"""Pixels in that part."""

SAMPLE = 4
"""Images of a batch that the search uses; its result is measured on all of them."""

BLOCK = 8
"""Side of the blocks whose means are fitted: an interpolation changes details smaller than its kernel, not
the mean of 64 pixels. A fit of single pixels would find too small a factor (regression dilution)."""

OUTLIERS = 6.0
"""Deviations, estimated from the median, beyond which a pixel (clipped, or from a border) is ignored."""

ALIKE = 1.1
"""Ratio of unexplained variances up to which the usual order of channels wins over a better one."""

NOISE = 1e-7
"""Unexplained share of the variance that float32 arithmetic explains."""


@dataclass(frozen=True)
class Match:
    """The best explanation; `zoom` is True if ours is resized to the size of theirs first."""

    layouts: tuple[Layout, Layout]
    placement: Placement
    fit: Fit
    boxes: tuple[Box, Box]
    zoom: bool

    @property
    def related(self) -> bool:
        return self.fit.unexplained <= RELATED

    @property
    def changes(self) -> int:
        """The number of changes, by which the simplest explanation is chosen."""
        return self.placement.changes + (not self.fit.in_order)


def match(ours: Array, theirs: Array) -> Match | None:
    """The best relation of theirs to ours; None if they are no images, or differ in number or channels."""
    found = [m for pair in layout_pairs(ours.shape, theirs.shape) for m in _matches(ours, theirs, pair)]
    if not found:
        return None
    allowed = SIMPLER * min(m.fit.unexplained for m in found) + NOISE
    good = [m for m in found if m.fit.unexplained <= allowed]
    return min(good, key=lambda m: (m.zoom, m.layouts[0] != m.layouts[1], m.changes, m.fit.unexplained))


def _matches(ours: Array, theirs: Array, pair: tuple[Layout, Layout]) -> Iterator[Match]:
    mine, other = pair[0].canonical(ours)[:SAMPLE], pair[1].canonical(theirs)[:SAMPLE]
    best = 1.0
    for found in _placed(mine, other, pair, zoom=False):
        best = min(best, found.fit.unexplained)
        yield found
    if mine.shape != other.shape and best > RELATED:
        yield from _placed(zoomed(mine, other.shape), other, pair, zoom=True)


def zoomed(images: Array, shape: tuple[int, ...]) -> Array:
    """Resizes bilinearly, pixel centres at halves, to the height and width of `shape`."""
    size = shape[-2], shape[-1]
    bilinear = METHODS[0]
    resized = [resize(image.transpose(1, 2, 0), size, bilinear).transpose(2, 0, 1) for image in images]
    return np.stack(resized)


def _placed(ours: Array, theirs: Array, pair: tuple[Layout, Layout], *, zoom: bool) -> Iterator[Match]:
    everything = ours.astype(np.float64), theirs.astype(np.float64)
    if not all(np.isfinite(side).all() for side in everything):
        return
    mine, other = everything
    places = dict.fromkeys(placements(mine, other))
    ranked = sorted(places, key=lambda p: _glance(mine, other, p))[:LOOKED_AT]
    for place in dict.fromkeys([Placement(), *ranked]):
        parts = common(mine, other, place)
        found = fit(*parts) if parts else None
        if found is not None:
            boxes = content(place.turned(mine)), content(other)
            yield Match(pair, place, found, boxes, zoom)


def common(ours: Array, theirs: Array, place: Placement) -> tuple[Array, Array] | None:
    """The pixels [N, C, h, w] inside the borders of both images; None if there are too few."""
    turned = place.turned(ours)
    boxes = content(turned), content(theirs)
    rows, columns = place.overlap(turned.shape, theirs.shape)[1][1:]
    top = max(rows.start, boxes[1].top, boxes[0].top - place.dy)
    bottom = min(rows.stop, boxes[1].bottom, boxes[0].bottom - place.dy)
    left = max(columns.start, boxes[1].left, boxes[0].left - place.dx)
    right = min(columns.stop, boxes[1].right, boxes[0].right - place.dx)
    areas = [(b.bottom - b.top) * (b.right - b.left) for b in boxes]
    if bottom <= top or right <= left or (bottom - top) * (right - left) < LEAST_OVERLAP * min(areas):
        return None
    mine = turned[..., top + place.dy : bottom + place.dy, left + place.dx : right + place.dx]
    return mine, theirs[..., top:bottom, left:right]


def _glance(ours: Array, theirs: Array, place: Placement) -> float:
    """Share of the variance that a line leaves, on some pixels of the channels' sum."""
    parts = common(ours[:1], theirs[:1], place)
    if parts is None:
        return 2.0
    step = max(1, int((parts[0][0, 0].size / PIXELS) ** 0.5))
    flat = []
    for part in parts:
        flat.append(standard(part[0, :, ::step, ::step].reshape(part.shape[1], -1)).sum(0))
    norms = [float(np.linalg.norm(f)) for f in flat]
    return 1.0 - (float(flat[0] @ flat[1]) / (norms[0] * norms[1])) ** 2 if all(norms) else 1.0


def scalings(ours: Array, found: Match) -> tuple[Scaling, Scaling] | None:
    """The scalings that explain a fit: two named ones, or one named and one with its own constants."""
    ends = spans(ours, found)
    tolerance = max(4e-3, 0.5 * found.fit.unexplained**0.5)
    return named_pair(found.fit, ends, tolerance) or own_constants(found.fit, ends)


def spans(ours: Array, found: Match) -> Array:
    """Smallest and largest value of our channels without outliers, in the order of theirs: [channels, 2]."""
    images = found.layouts[0].canonical(ours)[:SAMPLE].swapaxes(0, 1)
    if not found.zoom:
        images = found.placement.turned(images)[..., *found.boxes[0].slices]
    inside = images.reshape(images.shape[0], -1).astype(np.float64)
    return np.asarray(np.percentile(inside, [0.5, 99.5], axis=1).T[list(found.fit.order)])


# -- the affine relation of two aligned images, channel by channel ------------------------------


def fit(ours: Array, theirs: Array) -> Fit | None:
    """The channel order and affine relation of two [N, C, H, W]; None for empty or not finite images."""
    if min(ours.shape) == 0:
        return None
    mine, other = (_flattened(a) for a in (ours, theirs))
    if not (np.isfinite(mine).all() and np.isfinite(other).all()):
        return None
    order = _order(mine, other)
    blocks = _block_means(ours), _block_means(theirs)
    factor, offset = np.ones(len(order)), np.zeros(len(order))
    left = 0.0
    for channel, source in enumerate(order):
        factor[channel], offset[channel] = _line(mine[source], other[channel])
        rest = mine[source] * factor[channel] + offset[channel] - other[channel]
        if _share(_trimmed(rest), other[channel]) > 1e-5 and blocks[0].shape[1] >= 64:
            factor[channel], offset[channel] = _line(blocks[0][source], blocks[1][channel])
            rest = mine[source] * factor[channel] + offset[channel] - other[channel]
        left += _share(_trimmed(rest), other[channel])
    return Fit(order, factor, offset, left / len(order))


def _share(rest: Array, values: Array) -> float:
    return float(np.mean(rest**2)) / (float(np.var(values)) or 1.0)


def _trimmed(rest: Array) -> Array:
    """The values without the largest hundredth: clipped pixels and edges of a border."""
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
    """Our channel for each of theirs; unchanged if no other order explains more."""
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
    """[theirs, ours]: share of the variance of a channel that a line through another leaves."""
    a, b = (standard(side) for side in (mine, other))
    found = 1.0 - (b @ a.T / mine.shape[1]) ** 2
    flat = [np.ptp(side, axis=1) == 0 for side in (mine, other)]
    found[np.ix_(flat[1], flat[0])] = 0.0  # a constant explains a constant
    return np.asarray(np.maximum(found, 0.0))


def _line(x: Array, y: Array) -> tuple[float, float]:
    """Least squares for y = a x + b without outliers; a = 1 if x does not vary."""
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
    a = a if math.isfinite(a) else 1.0
    return a, y_mean - a * x_mean
