"""What relates two arrays of images: layout, orientation, shift, channels and scale, found together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rewriter.data.parity.align import LEAST_OVERLAP, Box, Placement, content, placements
from rewriter.data.parity.fits import NOISE, fit
from rewriter.data.parity.layouts import Layout, layout_pairs
from rewriter.data.parity.scales import SCALINGS, Fit, Scaling, named_pair
from rewriter.model import Array

RELATED = 0.3
"""Share of the variance that may be left over between two versions of one image. Photographs that have
nothing to do with each other leave more than 0.8; another interpolation leaves less than 0.1."""

SIMPLER = 1.2
"""Ratio of unexplained variances up to which the simpler of two explanations wins."""

LOOKED_AT = 6
"""Placements that are fitted in full, after a look at a part of the pixels."""

PIXELS = 20_000
"""Pixels of that look."""

SAMPLE = 4
"""Images of a batch that the search looks at; what it finds is measured on all of them."""


LEAST_STD = 10.0
"""Deviation of pixels 0..255 from which on a divisor is one: photographs have 30 to 80."""


@dataclass(frozen=True)
class Match:
    """The best explanation: `zoom` says that ours was resized to their size first."""

    layouts: tuple[Layout, Layout]
    placement: Placement
    fit: Fit
    boxes: tuple[Box, Box]
    zoom: bool

    @property
    def related(self) -> bool:
        return self.fit.unexplained <= RELATED


def match(ours: Array, theirs: Array) -> Match | None:
    """How theirs comes from ours, as well as it can be told; None if they are no images of one count."""
    found = [m for pair in layout_pairs(ours.shape, theirs.shape) for m in _matches(ours, theirs, pair)]
    if not found:
        return None
    allowed = SIMPLER * min(m.fit.unexplained for m in found) + NOISE
    good = [m for m in found if m.fit.unexplained <= allowed]
    return min(good, key=lambda m: (m.zoom, m.layouts[0] != m.layouts[1], _changes(m), m.fit.unexplained))


def _changes(found: Match) -> int:
    return found.placement.changes + (found.fit.order != tuple(range(len(found.fit.order))))


def _matches(ours: Array, theirs: Array, pair: tuple[Layout, Layout]) -> Iterator[Match]:
    mine, other = pair[0].canonical(ours)[:SAMPLE], pair[1].canonical(theirs)[:SAMPLE]
    best = 1.0
    for found in _placed(mine, other, pair, zoom=False):
        best = min(best, found.fit.unexplained)
        yield found
    if mine.shape != other.shape and best > RELATED:
        yield from _placed(zoomed(mine, other.shape), other, pair, zoom=True)


def zoomed(images: Array, shape: tuple[int, ...]) -> Array:
    """Bilinear, pixel centres at halves, to the height and width of `shape`."""
    from scipy.ndimage import zoom

    factors = (1.0, 1.0, shape[-2] / images.shape[-2], shape[-1] / images.shape[-1])
    resized = zoom(images.astype(np.float64), factors, order=1, mode="nearest", grid_mode=True)
    return np.asarray(resized)


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
    """The pixels [N, C, h, w] that both have inside their borders; None if they are too few."""
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
    """Share of the variance that a line leaves over, on some pixels of the channels' sum."""
    parts = common(ours[:1], theirs[:1], place)
    if parts is None:
        return 2.0
    step = max(1, int((parts[0][0, 0].size / PIXELS) ** 0.5))
    flat = []
    for part in parts:
        some = part[0, :, ::step, ::step].reshape(part.shape[1], -1)
        deviation = some.std(axis=1, keepdims=True)
        flat.append(
            ((some - some.mean(axis=1, keepdims=True)) / np.where(deviation > 0, deviation, 1)).sum(0)
        )
    norms = [float(np.linalg.norm(f)) for f in flat]
    return 1.0 - (float(flat[0] @ flat[1]) / (norms[0] * norms[1])) ** 2 if all(norms) else 1.0


def scalings(ours: Array, found: Match) -> tuple[Scaling, Scaling] | None:
    """The named scalings behind a fit, or one named and one with constants of its own."""
    ends = spans(ours, found)
    tolerance = max(4e-3, 0.5 * found.fit.unexplained**0.5)
    return named_pair(found.fit, ends, tolerance) or _own_constants(found.fit, ends)


def spans(ours: Array, found: Match) -> Array:
    """Smallest and largest value of our channels in their order, outliers left out: [channels, 2]."""
    images = found.layouts[0].canonical(ours)[:SAMPLE].swapaxes(0, 1)
    if not found.zoom:
        images = found.placement.turned(images)[..., *found.boxes[0].slices]
    inside = images.reshape(images.shape[0], -1).astype(np.float64)
    return np.asarray(np.percentile(inside, [0.5, 99.5], axis=1).T[list(found.fit.order)])


def _own_constants(fit: Fit, given: Array) -> tuple[Scaling, Scaling] | None:
    """One side is 0..255 or 0..1, the other has a mean and a deviation that nobody has named."""
    if not np.all(fit.factor > 0):
        return None
    mine = plain_scaling(given)
    if mine is not None:
        return mine, _custom(mine.divisor, -fit.offset / fit.factor, 1.0 / fit.factor)
    other = plain_scaling(np.sort(given * fit.factor[:, None] + fit.offset[:, None], axis=1))
    if other is not None:  # ours = (theirs - offset) / factor, by our channels
        back = np.argsort(fit.order)
        return _custom(other.divisor, fit.offset[back], fit.factor[back]), other
    return None


def plain_scaling(ends: Array) -> Scaling | None:
    """0..1 or 0..255, if values [channels, 2] lie in it."""
    low, high = float(ends.min()), float(ends.max())
    for scaling, most, slack in ((SCALINGS[1], 1.0, 0.03), (SCALINGS[0], 255.0, 6.0)):
        if low >= -slack and high <= most + slack:
            return scaling
    return None


def _custom(divisor: float, mean: Array, std: Array) -> Scaling:
    """(pixel / divisor - mean) / std; for 0..1 where that gives a deviation as networks have them."""
    if divisor == 1.0 and float(std.min()) >= LEAST_STD:
        divisor, mean, std = 255.0, mean / 255.0, std / 255.0
    parts = [tuple(float(f"{v:.7g}") for v in part.tolist()) for part in (mean, std)]
    shown = [tuple(f"{v:.4g}" for v in np.round(part, 6)) for part in parts]
    texts = [s[0] if len(set(s)) == 1 else f"({', '.join(s)})" for s in shown]
    after = "" if divisor == 255.0 else " (of pixels 0..255)"
    deviation = "" if texts[1] == "1" else f" and standard deviation {texts[1]}"
    return Scaling(divisor, parts[0], parts[1], f"mean {texts[0]}{deviation}{after}")
