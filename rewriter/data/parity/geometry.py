"""Geometry of images: which axis is which, and where one image lies in another.

Two images may be mirrored, turned, shifted by whole pixels, or padded. Shifts come from phase correlation
(Kuglin and Hines 1975): the inverse transform of the normalised cross-power spectrum has its peak at the
shift, whatever the brightness and contrast of either image.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rewriter.model import Array

MOST_CHANNELS = 4
"""Channels of RGBA: an axis of at most this length counts as the axis of channels."""

LEAST_SIDE = 8
"""Shortest height or width: fewer pixels do not tell one relation from another."""

_CANDIDATES = {4: ("NCHW", "NHWC"), 3: ("CHW", "HWC", "NHW"), 2: ("HW",)}


@dataclass(frozen=True)
class Layout:
    """The axes of an image, one letter each: N, C, H, W."""

    axes: str

    def axis(self, letter: str) -> int | None:
        """Position of an axis; None if the array lacks it."""
        return self.axes.index(letter) if letter in self.axes else None

    def canonical(self, array: Array) -> Array:
        """The array as [N, C, H, W], a view; missing axes have size 1."""
        present = [letter for letter in "NCHW" if letter in self.axes]
        moved = array.transpose([self.axes.index(letter) for letter in present])
        index = tuple(slice(None) if letter in present else np.newaxis for letter in "NCHW")
        return moved[index]


def layouts(shape: tuple[int, ...]) -> Iterator[Layout]:
    """Possible layouts of an image of this shape, the usual one first."""
    found = [Layout(axes) for axes in _CANDIDATES.get(len(shape), ()) if _possible(axes, shape)]
    if not found and len(shape) == 4:
        found = [Layout("NCHW")]
    for layout in found:
        if min(shape[layout.axes.index(letter)] for letter in "HW") >= LEAST_SIDE:
            yield layout


def _possible(axes: str, shape: tuple[int, ...]) -> bool:
    if axes == "NHW":  # planes without channels: neither end is an axis of channels
        return min(shape[0], shape[2]) > MOST_CHANNELS
    return "C" not in axes or shape[axes.index("C")] <= MOST_CHANNELS


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


LEAST_OVERLAP = 0.25
"""Share of the smaller image that must lie in the other one: smaller overlaps fit by accident."""

PEAKS = 2
"""Peaks of each correlation that are tried; the fit decides among them."""


@dataclass(frozen=True)
class Box:
    """Content of a letterbox: rows `top` to `bottom` and columns `left` to `right`, ends excluded."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def slices(self) -> tuple[slice, slice]:
        return slice(self.top, self.bottom), slice(self.left, self.right)


@dataclass(frozen=True)
class Placement:
    """theirs[y, x] = turned(ours)[y + dy, x + dx], where `turned` swaps the axes, then flips."""

    swap: bool = False
    flip_v: bool = False
    flip_h: bool = False
    dy: int = 0
    dx: int = 0

    def turned(self, images: Array) -> Array:
        """The images [..., H, W] swapped and flipped, as a view."""
        if self.swap:
            images = images.swapaxes(-1, -2)
        return images[..., :: -1 if self.flip_v else 1, :: -1 if self.flip_h else 1]

    def overlap(self, ours: tuple[int, ...], theirs: tuple[int, ...]) -> tuple[Any, Any]:
        """Index of the pixels that both have: into the turned ours, and into theirs."""
        rows = _span(self.dy, ours[-2], theirs[-2])
        columns = _span(self.dx, ours[-1], theirs[-1])
        mine = (..., _moved(rows, self.dy), _moved(columns, self.dx))
        return mine, (..., rows, columns)

    @property
    def changes(self) -> int:
        """The number of changes."""
        return self.swap + self.flip_v + self.flip_h + bool(self.dy or self.dx)


def _span(shift: int, ours: int, theirs: int) -> slice:
    return slice(max(0, -shift), max(0, min(theirs, ours - shift)))


def _moved(span: slice, shift: int) -> slice:
    return slice(max(0, span.start + shift), max(0, span.stop + shift))


def content(images: Array) -> Box:
    """The box of images [N, C, H, W] without borders that have one value per channel in all of them."""
    height, width = images.shape[-2:]
    after = (images != images[..., :1, :1]).any(axis=(0, 1))
    before = (images != images[..., -1:, -1:]).any(axis=(0, 1))
    if not (after.any() and before.any()):
        return Box(0, height, 0, width)
    (top, left), (bottom, right) = np.argwhere(after).min(axis=0), np.argwhere(before).max(axis=0) + 1
    return Box(int(top), int(bottom), int(left), int(right))


def placements(ours: Array, theirs: Array) -> Iterator[Placement]:
    """Candidate placements of ours in theirs, both [N, C, H, W]: identity first, then correlation peaks."""
    yield Placement()
    target = flattened(theirs)
    for swap in (False, True):
        for flip_v in (False, True):
            for flip_h in (False, True):
                turn = Placement(swap, flip_v, flip_h)
                if swap and turn.turned(ours).shape != theirs.shape:
                    continue
                source = flattened(turn.turned(ours))
                shifts = {(0, 0), *_shifts(source, target)}
                yield from (Placement(swap, flip_v, flip_h, dy, dx) for dy, dx in sorted(shifts))


def flattened(images: Array) -> Array:
    """The sum of the channels at mean 0 and deviation 1, which does not depend on their order and scale.

    Borders of a letterbox are 0: an edge that only one image has would outweigh the rest.
    """
    box = content(images)
    flat = np.zeros(images.shape[-2:], np.float64)
    inside = images[0][:, *box.slices]
    flat[box.slices] = standard(inside.reshape(len(inside), -1)).sum(axis=0).reshape(inside.shape[1:])
    return flat


def standard(rows: Array) -> Array:
    """The rows at mean 0 and deviation 1; rows of one value at 0."""
    deviation = rows.std(axis=1, keepdims=True)
    return np.asarray((rows - rows.mean(axis=1, keepdims=True)) / np.where(deviation > 0, deviation, 1.0))


def _shifts(source: Array, target: Array) -> Iterator[tuple[int, int]]:
    """Whole shifts at the peaks of the cross-correlation and of the phase correlation."""
    size = (max(source.shape[0], target.shape[0]), max(source.shape[1], target.shape[1]))
    cross = np.fft.rfft2(source, size) * np.conj(np.fft.rfft2(target, size))
    strength = np.abs(cross)
    phase = cross / np.maximum(strength, 1e-9 * (float(strength.max()) or 1.0))
    for spectrum in (cross, phase):
        peaks = np.abs(np.fft.irfft2(spectrum, size))
        for place in np.argpartition(-peaks, PEAKS, axis=None)[:PEAKS]:
            y, x = np.unravel_index(int(place), size)
            for dy in _unwrapped(int(y), source.shape[0], target.shape[0], size[0]):
                for dx in _unwrapped(int(x), source.shape[1], target.shape[1], size[1]):
                    yield dy, dx


def _unwrapped(shift: int, ours: int, theirs: int, size: int) -> Iterator[int]:
    """The two shifts that a cyclic shift may stand for, if they leave enough overlap."""
    for found in (shift, shift - size):
        span = _span(found, ours, theirs)
        if span.stop - span.start >= LEAST_OVERLAP**0.5 * min(ours, theirs):
            yield found
