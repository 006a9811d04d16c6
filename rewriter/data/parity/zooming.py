"""Relates two images that show the middle of one photograph in other sizes: stretched, cropped, letterboxed.

A resize keeps the centre where it is; a crop in the middle and a border of two equal sides do, too. Two
numbers are left: the parts of our height and width that theirs covers. They are searched on small images,
then refined.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rewriter.data.parity.geometry import LEAST_OVERLAP, Box, content, flattened
from rewriter.data.parity.resampling import METHODS, resize
from rewriter.model import Array

SIDE = 48
"""Pixels a side of the images that are searched: a step of the search moves their border by one pixel."""

FINE = 160
"""Most pixels a side of the images that the best places are refined on."""

STEPS = 41
"""Parts of each axis that are tried, from 1 / `WIDEST` to `WIDEST` in equal ratios."""

WIDEST = 2.2
"""A square crop of a photograph of 16:9, resized to 256 and cut to 224, covers 1 / 2.03 of its width."""

LARGEST_STEP, SMALLEST_STEP = 0.03, 0.001
"""Logarithms of the ratios by which the parts are refined: 0.001 moves the border of 160 pixels by 0.08."""

WHOLE = 0.012
"""Deviation up to which a part counts as all of an axis: a pixel of 84."""

AREA = next(method for method in METHODS if method.kernel == "area")


@dataclass(frozen=True)
class Zoom:
    """theirs[y, x] = ours[scale * (y, x) + offset].

    Attributes:
        parts: Of the height and width of our content, how much theirs covers.
        boxes: The content of ours and of theirs, which borders surround.
    """

    scale: tuple[float, float]
    offset: tuple[float, float]
    parts: tuple[float, float] = (1.0, 1.0)
    boxes: tuple[Box, Box] | None = None

    @property
    def centred(self) -> bool:
        """True if borders or crops differ; False where all of ours was resized to all of theirs."""
        return self.boxes is not None

    def __call__(self, images: Array, size: tuple[int, int]) -> Array:
        """The images [N, C, H, W] at the places of theirs, bilinearly, in float64."""
        rows, columns = (
            _linear(source, np.arange(count) * scale + offset)
            for source, count, scale, offset in zip(
                images.shape[-2:], size, self.scale, self.offset, strict=True
            )
        )
        return np.asarray(np.matmul(np.matmul(rows, images.astype(np.float64)), columns.T))

    def seen(
        self, ours: tuple[int, ...], theirs: tuple[int, ...], *, borders: bool = False
    ) -> tuple[slice, slice]:
        """Rows and columns of theirs that show our content; all of them where nothing is centred.

        With `borders`, those of a border of theirs as well.
        """
        spans = [slice(0, size) for size in theirs[-2:]]
        if self.boxes is not None:
            for axis, (mine, other) in enumerate(zip(*(box.slices for box in self.boxes), strict=True)):
                places = np.arange(other.start, other.stop) * self.scale[axis] + self.offset[axis]
                inside = other.start + np.flatnonzero(
                    (places > mine.start - 0.5) & (places < mine.stop - 0.5)
                )
                seen = slice(int(inside[0]), int(inside[-1]) + 1)
                if seen != other or not borders:
                    spans[axis] = seen
        return spans[0], spans[1]


def whole(ours: tuple[int, ...], theirs: tuple[int, ...]) -> Zoom:
    """All of ours in the size of theirs, pixel centres at halves."""
    scales = tuple(a / b for a, b in zip(ours[-2:], theirs[-2:], strict=True))
    return Zoom((scales[0], scales[1]), ((scales[0] - 1) / 2, (scales[1] - 1) / 2))


def centred(ours: Array, theirs: Array) -> Iterator[Zoom]:
    """The zooms about the centre of the contents of two [N, C, H, W] under which they agree best."""
    boxes = content(ours), content(theirs)
    planes = [flattened(images)[box.slices] for images, box in zip((ours, theirs), boxes, strict=True)]
    if min(*planes[0].shape, *planes[1].shape) < 2:
        return
    steps = [WIDEST ** (2 * i / (STEPS - 1) - 1) for i in range(STEPS)]
    small = _small(planes[0], SIDE), _small(planes[1], SIDE)
    costs = {(fy, fx): _cost(*small, (fy, fx)) for fy in steps for fx in steps}
    fine = _small(planes[0], FINE), _small(planes[1], FINE)
    best = _refined(fine, min(costs, key=lambda parts: costs[parts]))
    snapped = tuple(1.0 if abs(part - 1.0) <= WHOLE else part for part in best)
    for parts in dict.fromkeys([(snapped[0], snapped[1]), (1.0, 1.0)]):
        yield _zoom(parts, boxes)


def _zoom(parts: tuple[float, float], boxes: tuple[Box, Box]) -> Zoom:
    scale, offset = [], []
    for part, mine, other in zip(parts, *(box.slices for box in boxes), strict=True):
        scale.append(part * (mine.stop - mine.start) / (other.stop - other.start))
        offset.append((mine.start + mine.stop - 1 - scale[-1] * (other.start + other.stop - 1)) / 2)
    return Zoom((scale[0], scale[1]), (offset[0], offset[1]), parts, boxes)


def _small(plane: Array, side: int) -> Array:
    """The plane at `side` pixels a side; at its own size where that is smaller."""
    size = min(side, plane.shape[0]), min(side, plane.shape[1])
    return plane if size == plane.shape else resize(plane[..., None], size, AREA)[..., 0]


def _cost(mine: Array, other: Array, parts: tuple[float, float]) -> float:
    """Share of the variance of theirs that a line through ours leaves where both have pixels."""
    rows, columns = (_weights(mine.shape[i], other.shape[i], parts[i]) for i in (0, 1))
    if rows[1].size * columns[1].size < LEAST_OVERLAP * min(1.0, 1 / (parts[0] * parts[1])) * other.size:
        return 2.0
    made = (rows[0] @ mine @ columns[0].T).reshape(-1)
    seen = other[np.ix_(rows[1], columns[1])].reshape(-1)
    made, seen = made - made.mean(), seen - seen.mean()
    norm = float((made @ made) * (seen @ seen))
    return 1.0 - float(made @ seen) * abs(float(made @ seen)) / norm if norm else 1.0


def _weights(source: int, size: int, part: float) -> tuple[Array, Array]:
    """Linear interpolation of the pixels of theirs that lie in ours, [seen, source], and which they are."""
    places = (source - 1) / 2 + part * source / size * (np.arange(size) - (size - 1) / 2)
    seen = np.flatnonzero((places > -0.5) & (places < source - 0.5))
    return _linear(source, places[seen]), seen


def _linear(source: int, places: Array) -> Array:
    """Weights of linear interpolation at places among pixels, [places, source]; borders are repeated."""
    inside = np.clip(places, 0, source - 1)
    return np.asarray(np.maximum(0.0, 1.0 - np.abs(inside[:, None] - np.arange(source))))


def _refined(planes: tuple[Array, Array], parts: tuple[float, float]) -> tuple[float, float]:
    """The parts at a minimum of the cost: the best neighbour until none is better, then half the step."""
    step, logs = LARGEST_STEP, (math.log(parts[0]), math.log(parts[1]))
    while step >= SMALLEST_STEP:
        near = [(logs[0] + step * i, logs[1] + step * j) for i in (0, 1, -1) for j in (0, 1, -1)]
        best = min(near, key=lambda place: _cost(*planes, (math.exp(place[0]), math.exp(place[1]))))
        step, logs = (step / 2, logs) if best == logs else (step, best)
    return math.exp(logs[0]), math.exp(logs[1])
