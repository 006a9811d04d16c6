"""Relates two arrays of images: layout, orientation, place, order of channels and scale, found together.

Shifts come from phase correlation (Kuglin and Hines 1975), which ignores brightness; crops and letterboxes
from a search of the two parts of our height and width that theirs shows. A line is fitted to each channel
where both have content. Of explanations that fit equally well, the simplest wins.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from rewriter.ir.model import Array
from rewriter.parity.scales import Fit

MOST_CHANNELS = 4
"""Channels of RGBA: an axis of at most this length counts as the axis of channels."""

LEAST_SIDE = 8
"""Shortest height or width: fewer pixels do not tell one relation from another."""

LEAST_OVERLAP = 0.25
"""Share of the smaller image that must lie in the other one: smaller overlaps fit by accident."""

RELATED = 0.3
"""Largest unexplained share of the variance between two versions of one image. Unrelated photographs leave
more than 0.8; another interpolation leaves less than `INTERPOLATED`."""

INTERPOLATED = 0.1

SIMPLER = 1.2
"""Ratio of unexplained variances up to which the simpler of two explanations wins."""

LOOKED_AT = 6
"""Shifts that are fitted with all pixels."""

SAMPLE = 4
"""Images of a batch that the search uses; its result is measured on all of them."""

BLOCK = 8
"""Side of the blocks whose means are fitted: an interpolation changes details smaller than its kernel, not
the mean of 64 pixels. A fit of single pixels would find too small a factor (regression dilution)."""

NOISE = 1e-7
"""Unexplained share of the variance that float32 arithmetic explains."""

WIDEST = 2.2
"""A square crop of a photograph of 16:9, resized to 256 and cut to 224, covers 1 / 2.03 of its width."""

WHOLE = 0.012
"""Deviation up to which a part counts as all of an axis: a pixel of 84."""

Window = tuple[slice, slice]
"""Rows and columns."""


@dataclass(frozen=True)
class Placement:
    """theirs[y, x] = turned(ours)[scale * (y, x) + offset]; `turn`: swap the axes, flip rows, flip columns.

    `parts`: shares of our height and width that theirs shows, if borders or crops differ.
    """

    turn: tuple[bool, bool, bool] = (False, False, False)
    scale: tuple[float, float] = (1.0, 1.0)
    offset: tuple[float, float] = (0.0, 0.0)
    parts: tuple[float, float] | None = None

    @property
    def resizes(self) -> bool:
        return self.scale != (1.0, 1.0) or any(o != round(o) for o in self.offset)

    def turned(self, images: Array) -> Array:
        """The images [..., H, W] swapped and flipped, as a view."""
        swap, down, right = self.turn
        images = images.swapaxes(-1, -2) if swap else images
        return images[..., :: -1 if down else 1, :: -1 if right else 1]

    def window(self, mine: Window, other: Window) -> Window | None:
        """The part of the window of theirs that lies in the window of (turned) ours."""
        spans = []
        for scale, offset, own, their in zip(self.scale, self.offset, mine, other, strict=True):
            places = np.arange(their.start, their.stop) * scale + offset
            inside = np.flatnonzero((places > own.start - 0.5) & (places < own.stop - 0.5))
            if not inside.size:
                return None
            spans.append(slice(their.start + int(inside[0]), their.start + int(inside[-1]) + 1))
        return spans[0], spans[1]

    def sampled(self, images: Array, window: Window) -> Array:
        """The (turned) images [..., H, W] at the pixels of a window of theirs, bilinearly."""
        places = [
            np.arange(w.start, w.stop) * s + o
            for w, s, o in zip(window, self.scale, self.offset, strict=True)
        ]
        rows = interpolated(images.swapaxes(-1, -2), places[0]).swapaxes(-1, -2)
        return interpolated(rows, places[1])


@dataclass(frozen=True)
class Relation:
    """How theirs comes from ours; `axes` are the layouts of ours and theirs, as letters N, C, H, W."""

    axes: tuple[str, str]
    place: Placement
    fit: Fit

    @property
    def changes(self) -> tuple[bool, bool, int, float]:
        """The order of explanations that fit equally well, the simplest first."""
        moved = sum(self.place.turn) + any(self.place.offset) + (not self.fit.in_order)
        return self.place.resizes, self.axes[0] != self.axes[1], moved, self.fit.unexplained

    def sides(self, ours: Array, theirs: Array) -> tuple[Array, Array]:
        """Both as [N, C, H, W], ours turned."""
        return self.place.turned(canonical(ours, self.axes[0])), canonical(theirs, self.axes[1])


def relation(ours: Array, theirs: Array) -> Relation | None:
    """The simplest good relation; None if they are no images, differ in number, or show different things."""
    relations = [r for axes in axes_pairs(ours.shape, theirs.shape) for r in _relations(ours, theirs, axes)]
    least = min((r.fit.unexplained for r in relations), default=1.0)
    good = [r for r in relations if r.fit.unexplained <= SIMPLER * least + NOISE]
    return min(good, key=lambda r: r.changes) if least <= RELATED else None


def _relations(ours: Array, theirs: Array, axes: tuple[str, str]) -> Iterator[Relation]:
    sides = [canonical(a, x)[:SAMPLE].astype(np.float64) for a, x in zip((ours, theirs), axes, strict=True)]
    if not all(np.isfinite(side).all() for side in sides):
        return
    least = 1.0
    for search, needed in ((_shifts, 0.0), (_resizes, RELATED), (_crops, INTERPOLATED)):
        if least <= needed or (search is _crops and axes[0] != axes[1]):
            continue
        for place in search(sides[0], sides[1]):
            fit = _fit(sides[0], sides[1], place)
            if fit is not None:
                least = min(least, fit.unexplained)
                yield Relation(axes, place, fit)


# -- layouts ------------------------------------------------------------------------------------


def axes_pairs(ours: tuple[int, ...], theirs: tuple[int, ...]) -> list[tuple[str, str]]:
    """Layouts of both shapes in which batch and channels agree, equal layouts first."""
    pairs = []
    for pair in itertools.product(layouts(ours), layouts(theirs)):
        sizes = [
            dict(zip(axes, shape, strict=True)) for axes, shape in zip(pair, (ours, theirs), strict=True)
        ]
        if all(sizes[0].get(letter, 1) == sizes[1].get(letter, 1) for letter in "NC"):
            pairs.append(pair)
    return sorted(pairs, key=lambda pair: pair[0] != pair[1])


def layouts(shape: tuple[int, ...]) -> list[str]:
    """Possible layouts of images of this shape, the usual one first."""
    usual = {4: ["NCHW", "NHWC"], 3: ["CHW", "HWC", "NHW"], 2: ["HW"]}.get(len(shape), [])
    possible = []
    for axes in usual:
        sizes = dict(zip(axes, shape, strict=True))
        planes = axes == "NHW" and min(shape[0], shape[2]) <= MOST_CHANNELS  # an end is an axis of channels
        if sizes.get("C", 1) <= MOST_CHANNELS and not planes:
            possible.append(axes)
    possible = possible or usual[:1] * (len(shape) == 4)
    return [axes for axes in possible if min(shape[axes.index("H")], shape[axes.index("W")]) >= LEAST_SIDE]


def canonical(array: Array, axes: str) -> Array:
    """The array as [N, C, H, W], a view; missing axes have size 1."""
    moved = array.transpose([axes.index(letter) for letter in "NCHW" if letter in axes])
    return moved[tuple(slice(None) if letter in axes else None for letter in "NCHW")]


# -- places -------------------------------------------------------------------------------------

TURNS = tuple(Placement((s, v, h)) for s, v, h in itertools.product((False, True), repeat=3))


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


def area(window: Window) -> int:
    return math.prod(extent(window))


def interpolated(rows: Array, places: Array) -> Array:
    """The rows [..., pixels] at places among pixels, linearly; borders are repeated."""
    inside = np.clip(places, 0, rows.shape[-1] - 1)
    first = inside.astype(int)
    part = inside - first
    if not part.any():
        return np.asarray(rows[..., first])
    return np.asarray(rows[..., first] * (1 - part) + rows[..., np.ceil(inside).astype(int)] * part)


def _shifts(ours: Array, theirs: Array) -> list[Placement]:
    """The identity, and the best turns and shifts, on some 20,000 pixels."""
    target, box, costs = _plane(theirs), content(theirs), dict[Placement, float]()
    step = max(1, int((target.size / 20_000) ** 0.5))
    for turn in TURNS:
        source, own = _plane(turn.turned(ours)), content(turn.turned(ours))
        if source.shape == target.shape or not turn.turn[0]:
            for offset in ((0, 0), _peak(source, target)):
                place = replace(turn, offset=offset)
                costs[place] = _cost(source, target, place, place.window(own, box), step)
    return list(dict.fromkeys([Placement(), *sorted(costs, key=lambda place: costs[place])[:LOOKED_AT]]))


def _cost(source: Array, target: Array, place: Placement, window: Window | None, step: int = 1) -> float:
    """Share of the variance of the plane of theirs that a line through ours leaves in a window."""
    least = LEAST_OVERLAP * min(1.0, 1 / math.prod(place.parts or (1.0,)))
    if window is None or area(window) < least * target.size:
        return 2.0
    sides = (part[::step, ::step].reshape(1, -1) for part in (place.sampled(source, window), target[window]))
    a, b = (standard(side)[0] for side in sides)
    return 1.0 - float(a @ b / a.size) ** 2


def _plane(images: Array) -> Array:
    """The sum of the first image's channels at mean 0 and deviation 1: ignores their order and scale.

    Borders are 0: an edge that only one image has would outweigh the rest.
    """
    box = content(images)
    plane = np.zeros(images.shape[-2:])
    inside = images[0][:, *box]
    plane[box] = standard(inside.reshape(len(inside), -1)).sum(axis=0).reshape(inside.shape[1:])
    return plane


def standard(rows: Array) -> Array:
    """The rows at mean 0 and deviation 1; rows of one value at 0."""
    deviation = rows.std(axis=1, keepdims=True)
    return np.asarray((rows - rows.mean(axis=1, keepdims=True)) / np.where(deviation > 0, deviation, 1.0))


def _peak(source: Array, target: Array) -> tuple[int, int]:
    """The whole shift at the peak of the phase correlation."""
    size = (source.shape[0] + target.shape[0], source.shape[1] + target.shape[1])  # no shift wraps around
    cross = np.fft.rfft2(source, size) * np.conj(np.fft.rfft2(target, size))
    peaks = np.fft.irfft2(cross / np.maximum(np.abs(cross), 1e-9 * (float(np.abs(cross).max()) or 1.0)), size)
    y, x = np.unravel_index(int(np.argmax(np.abs(peaks))), size)
    return _signed(int(y), source.shape[0], size[0]), _signed(int(x), source.shape[1], size[1])


def _signed(shift: int, ours: int, size: int) -> int:
    return shift if shift < ours else shift - size


def _resizes(ours: Array, theirs: Array) -> Iterator[Placement]:
    """All of ours, turned in any way, in another size."""
    for turn in TURNS if ours.shape != theirs.shape else ():
        zoom = _zoomed(np.ones(2), whole(turn.turned(ours)), whole(theirs))
        yield replace(zoom, turn=turn.turn, parts=None)


def _crops(ours: Array, theirs: Array) -> Iterator[Placement]:
    """The parts of our content about its centre that theirs may show: crops, letterboxes, stretches."""
    boxes = content(ours), content(theirs)
    planes = [_plane(images)[box] for images, box in zip((ours, theirs), boxes, strict=True)]
    if min(*planes[0].shape, *planes[1].shape) < 2:
        return
    step, logs = np.log(WIDEST) / 12, np.zeros(2)
    for side, reach in ((48, 12), *[(128, 2)] * 5):
        mine, other = (_shrunk(plane, side) for plane in planes)
        boxes_here = whole(mine), whole(other)
        near = [logs + step * np.array(i) for i in itertools.product(range(-reach, reach + 1), repeat=2)]
        zooms = [_zoomed(np.exp(place), *boxes_here) for place in near]
        logs = near[int(np.argmin([_cost(mine, other, z, z.window(*boxes_here)) for z in zooms]))]
        step /= 2
    best = np.where(np.abs(np.exp(logs) - 1.0) <= WHOLE, 1.0, np.exp(logs))
    yield from (_zoomed(parts, *boxes) for parts in (best, np.ones(2)))


def _zoomed(parts: Array, mine: Window, other: Window) -> Placement:
    """The placement at which theirs shows these parts of the middle of ours."""
    scale, offset = [], []
    for part, own, their in zip(parts.tolist(), mine, other, strict=True):
        scale.append(part * (own.stop - own.start) / (their.stop - their.start))
        offset.append((own.start + own.stop - 1 - scale[-1] * (their.start + their.stop - 1)) / 2)
    return Placement(scale=(scale[0], scale[1]), offset=(offset[0], offset[1]), parts=(parts[0], parts[1]))


def _shrunk(plane: Array, side: int) -> Array:
    """The plane at most `side` pixels a side, each the mean of a triangle as wide as the scale."""
    for _ in range(2):
        source = len(plane)
        if source > side:
            places = (np.arange(side) + 0.5) * source / side - 0.5
            weights = np.maximum(0.0, 1.0 - np.abs(places[:, None] - np.arange(source)) * side / source)
            plane = weights / weights.sum(axis=1, keepdims=True) @ plane
        plane = plane.T
    return plane


# -- the affine relation of two aligned images, channel by channel ------------------------------


def _fit(ours: Array, theirs: Array, place: Placement) -> Fit | None:
    """The channel order and affine relation of two [N, C, H, W] inside the borders of both."""
    turned = place.turned(ours)
    boxes = content(turned), content(theirs)
    window = place.window(*boxes)
    if window is None or (not place.resizes and area(window) < LEAST_OVERLAP * min(map(area, boxes))):
        return None
    images = place.sampled(turned, window), theirs[..., *window]
    mine, other = (side.swapaxes(0, 1).reshape(side.shape[1], -1) for side in images)
    order = _order(mine, other)
    blocks = [_block_means(side) for side in images]
    lines, left = [], 0.0
    for channel, source in enumerate(order):
        line = _line(mine[source], other[channel])
        share = _share(line, mine[source], other[channel])
        if share > 1e-5 and blocks[0].shape[1] >= 64:
            line = _line(blocks[0][source], blocks[1][channel])
            share = _share(line, mine[source], other[channel])
        lines.append(line)
        left += share / len(order)
    factor, offset = np.array(lines).T
    return Fit(order, factor, offset, left)


def _share(line: tuple[float, float], x: Array, y: Array) -> float:
    """Share of the variance of y that the line leaves, without the largest hundredth: clipped pixels."""
    squares = (line[0] * x + line[1] - y) ** 2
    cut = len(squares) - max(1, len(squares) // 100)
    return float(np.mean(np.partition(squares, cut)[:cut])) / (float(np.var(y)) or 1.0) if cut else 0.0


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
    a, b = standard(mine), standard(other)
    left = np.maximum(1.0 - (b @ a.T / a.shape[1]) ** 2, 0.0)
    left[np.ix_(np.ptp(other, axis=1) == 0, np.ptp(mine, axis=1) == 0)] = 0.0  # a constant explains one
    costs = {o: sum(left[c, source] for c, source in enumerate(o)) for o in itertools.permutations(same)}
    allowed = 1.1 * min(costs.values()) + NOISE * count
    usual = (same, (2, 1, 0, *same[3:])) if count >= 3 else (same,)
    return next((o for o in usual if costs[o] <= allowed), min(costs, key=lambda o: costs[o]))


def _line(x: Array, y: Array) -> tuple[float, float]:
    """Least squares for y = a x + b without outliers (clipped, or from a border); a = 1 if x is constant."""
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
    return a, b
