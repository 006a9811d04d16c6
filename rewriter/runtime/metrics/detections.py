"""Outputs of detectors, compared as detections: the same boxes, with the same scores and classes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rewriter.ir.model import Array
from rewriter.runtime.metrics.pairwise_error import is_float
from rewriter.runtime.metrics.row_errors import MOST_ROWS, SET_SHARE
from rewriter.runtime.metrics.tolerances import TOLERANCES

THRESHOLD = 0.25
"""Score of a box that counts: the default of Ultralytics' predict."""

SCORE_STEP = 0.05
"""Largest difference of two scores of one box: thresholds are set in such steps, so that a score this far
below one is no lost box."""

SAME_PLACE = 0.5
"""Least IoU of two boxes round one object, as for average precision at 50 % (VOC, COCO)."""

UNNAMED_ROWS = 16
"""Fewest rows of an output of four columns that is taken for boxes though its name does not say so."""

Outputs = Mapping[str, Array]


@dataclass(frozen=True)
class View:
    """An output as tables [images, rows, columns].

    `batch` is the axis of images among the last three; None for one value in a row, [rows] or [images, rows].
    """

    name: str
    batch: int | None
    turned: bool

    def of(self, outputs: Outputs) -> Array:
        array = outputs[self.name]
        if self.batch is None:
            return np.asarray(array.reshape(math.prod(array.shape[:-1]), array.shape[-1], 1))
        shape = math.prod(array.shape[:-2]), *array.shape[-2:]  # also of no rows
        tables = np.moveaxis(array.reshape(shape), self.batch, 0)
        return np.asarray(tables.swapaxes(1, 2) if self.turned else tables)


@dataclass(frozen=True, eq=False)
class Boxes:
    """The boxes of one image in float64: [rows, 4], scores [rows, classes], and labels [rows], 0 without."""

    corners: Array
    scores: Array
    labels: Array

    @property
    def best(self) -> Array:
        """The largest score of each row."""
        return np.asarray(self.scores.max(axis=1))

    @property
    def has_probabilities(self) -> bool:
        """True if the scores are from 0 to 1, and not numbers of classes."""
        return bool(np.all((self.scores >= 0.0) & (self.scores <= 1.0)) and np.any(self.scores % 1.0))


@dataclass(frozen=True)
class Columns:
    """Columns of a table: the first of a box, its scores, and the class or a factor of all scores."""

    first: int
    scores: slice
    label: int | None = None
    factor: int | None = None

    def of(self, table: Array) -> Boxes:
        scores = table[:, self.scores]
        if self.factor is not None:
            scores = scores * table[:, self.factor, None]
        labels = np.zeros(len(table)) if self.label is None else table[:, self.label]
        return Boxes(table[:, self.first : self.first + 4], scores, labels)


@dataclass(frozen=True)
class Detections:
    """The boxes of the original above the threshold, and how the result has them, over all samples."""

    boxes: int = 0
    found: int = 0
    more: int = 0  # boxes of the result that the original does not have
    overlap: float = 0.0  # the sum of the IoUs of the boxes that were found
    away: float = 0.0  # largest difference of a score of theirs

    def __add__(self, other: Detections) -> Detections:
        boxes, found, more = self.boxes + other.boxes, self.found + other.found, self.more + other.more
        return Detections(boxes, found, more, self.overlap + other.overlap, max(self.away, other.away))

    @property
    def passed(self) -> bool:
        """True if at most 5 % of the boxes come or go: as many rows of a TopK do in a right model."""
        return self.no_worse(Detections())

    def no_worse(self, other: Detections) -> bool:
        """True if at most 5 % of the boxes come or go in addition to those that do in another result."""
        gone = self.boxes - self.found + self.more - (other.boxes - other.found + other.more)
        return gone <= max(1.0, (1.0 - SET_SHARE) * self.boxes)

    def __str__(self) -> str:
        more = f", {self.more} more" if self.more else ""
        text = f"{self.found} of {self.boxes} boxes above {THRESHOLD} found{more}"
        within = f", IoU {self.overlap / max(self.found, 1):.3g}, scores within {self.away:.2g}"
        return text + (within if self.found else "")


@dataclass(frozen=True)
class Layout:
    """Where an original has its boxes and scores: in two outputs, or in one table of `columns`."""

    boxes: View
    scores: View | None = None
    columns: Columns | None = None
    centres: bool = False  # x, y, width, height in place of two corners

    def form(self, outputs: Outputs) -> tuple[list[int], int]:
        """The columns of its tables, which no sample changes; 1 if these have rows in common."""
        shapes = [view.of(outputs).shape for view in (self.boxes, self.scores) if view is not None]
        return [shape[2] for shape in shapes], len({shape[:2] for shape in shapes})

    def read(self, outputs: Outputs) -> Iterator[Boxes]:
        """The boxes of each image."""
        tables = self.boxes.of(outputs)
        others = tables if self.scores is None else self.scores.of(outputs)
        for table, other in zip(tables.astype(np.float64), others.astype(np.float64), strict=True):
            yield self.columns.of(table) if self.columns else Boxes(table, other, np.zeros(len(table)))

    def compare(self, expected: Outputs, actual: Outputs) -> Detections:
        """The boxes of one sample of two models, of equal shapes."""
        pairs = zip(self.read(expected), self.read(actual), strict=True)
        return sum((self._compare(*pair) for pair in pairs), Detections())

    def _compare(self, ours: Boxes, theirs: Boxes) -> Detections:
        found, overlaps, away = self._partners(ours, theirs)
        back, *_ = self._partners(theirs, ours)
        if not found.size:
            return Detections()
        largest = float(away[found].max(initial=0.0))
        more = int(back.size - back.sum())
        return Detections(found.size, int(found.sum()), more, float(overlaps[found].sum()), largest)

    def _partners(self, ours: Boxes, theirs: Boxes) -> tuple[Array, Array, Array]:
        """For each box above the threshold: True if the other side has it, its IoU, the scores' difference.

        A row is compared with the same row, and with all others if that is another box.
        """
        rows = np.flatnonzero(ours.best >= THRESHOLD)
        found, overlaps, away = self._alike(ours, theirs, rows, rows)
        everywhere = np.arange(len(theirs.best))
        for index in np.flatnonzero(~found)[:MOST_ROWS]:
            same, near, differ = self._alike(ours, theirs, rows[index : index + 1], everywhere)
            if same.any():
                best = int(np.argmax(np.where(same, near, -1.0)))
                found[index], overlaps[index], away[index] = True, near[best], differ[best]
        return found, overlaps, away

    def _alike(self, ours: Boxes, theirs: Boxes, left: Array, right: Array) -> tuple[Array, Array, Array]:
        """As `_partners`, for rows `left` of ours and `right` of theirs, or one of ours and all of theirs."""
        classes = ours.scores[left].argmax(axis=1)
        away = np.abs(ours.scores[left, classes] - theirs.scores[right, classes])
        a, b = ours.corners[left], theirs.corners[right]
        sides = [a, b]
        if self.centres:
            halves = [boxes[:, 2:] / 2.0 for boxes in sides]
            pairs = zip((boxes[:, :2] for boxes in sides), halves, strict=True)
            sides = [np.concatenate([centre - half, centre + half], axis=1) for centre, half in pairs]
        overlaps = overlap(*sides)
        size = TOLERANCES["fp16"].value * float(np.abs(ours.corners).max(initial=0.0))
        near = (overlaps >= SAME_PLACE) | (np.abs(a - b).max(axis=1, initial=0.0) <= size)  # boxes of a pixel
        same = near & (away <= SCORE_STEP) & (ours.labels[left] == theirs.labels[right])
        return same, overlaps, away


def overlap(a: Array, b: Array) -> Array:
    """IoU of boxes [n, 4] with the same row, by their corners; 0 where a box has no area."""
    sides = np.maximum(np.minimum(a[:, 2:], b[:, 2:]) - np.maximum(a[:, :2], b[:, :2]), 0.0)
    common = sides.prod(axis=1)
    areas = [np.maximum(boxes[:, 2:] - boxes[:, :2], 0.0).prod(axis=1) for boxes in (a, b)]
    union = areas[0] + areas[1] - common
    return np.asarray(np.divide(common, union, out=np.zeros_like(common), where=union > 0.0))


def layout_of(samples: Sequence[Outputs]) -> Layout | None:
    """Where the original's outputs hold boxes with scores from 0 to 1; None if they hold none."""
    for layout in layouts(samples[0]) if samples else ():
        name, rows = layout.boxes.name, layout.boxes.of(samples[0]).shape[1]
        batch = samples[0][name].ndim == 2 and layout.boxes.turned  # or of four items: names decide
        if layout.scores and (rows < UNNAMED_ROWS or batch) and "box" not in name.lower():
            continue
        if any(layout.form(outputs) != layout.form(samples[0]) for outputs in samples[1:]):
            continue  # such as a cache of four tokens that grows
        images = [boxes for outputs in samples for boxes in layout.read(outputs)]
        shown = np.concatenate([boxes.corners[boxes.best >= THRESHOLD] for boxes in images])
        if not (all(boxes.has_probabilities for boxes in images) and len(shown) and np.isfinite(shown).all()):
            continue
        centres = bool(np.any(shown[:, 2:] < shown[:, :2]))
        if not centres or np.all(shown[:, 2:] >= 0.0):
            return replace(layout, centres=centres)
    return None


def layouts(outputs: Outputs) -> Iterator[Layout]:
    """Outputs that may hold boxes, with those that may hold their scores."""
    floats = {name: array for name, array in outputs.items() if is_float(array) and array.size}
    for name, array in floats.items():
        for view in _views(name, array):
            shape = view.of(outputs).shape
            if (columns := _columns(view.of(outputs)[0], view.turned)) is not None:
                yield Layout(view, columns=columns)
            if shape[2] == 4:
                others = (other for n, a in floats.items() if n != name for other in _views(n, a))
                yield from (Layout(view, o) for o in others if o.of(outputs).shape[:2] == shape[:2])


def _views(name: str, array: Array) -> Iterator[View]:
    if array.ndim in (1, 2):
        yield View(name, None, turned=False)
    if array.ndim >= 2:
        batches = (0,) if array.ndim == 2 else sorted(range(3), key=lambda axis: array.shape[-3:][axis] != 1)
        yield from (View(name, batch, turned) for batch in batches for turned in (False, True))


def _columns(table: Array, turned: bool) -> Columns | None:
    """The columns of a table with boxes and scores: [N, 6] with score and class, [N, 7] with the image first
    and the score last, [4 + classes, N], or [N, 5 + classes] with an objectness."""
    width = table.shape[1]

    def shares(columns: Array) -> bool:
        return bool(((columns >= 0.0) & (columns <= 1.0) | np.isnan(columns)).all())

    def whole(column: Array) -> bool:
        return bool((np.nan_to_num(column) % 1.0 == 0.0).all())

    if width == 6 and shares(table[:, 4]) and whole(table[:, 5]):
        return Columns(0, slice(4, 5), label=5)
    if width == 7 and shares(table[:, 6]) and whole(table[:, 0]) and whole(table[:, 5]):
        return Columns(1, slice(6, 7), label=5)
    if 5 <= width <= len(table) and shares(table[:, 4:]) and not shares(table[:, :4]):
        return Columns(0, slice(4, None)) if turned or width == 5 else Columns(0, slice(5, None), factor=4)
    return None


def compared(layout: Layout, expected: Outputs, actual: Outputs) -> Detections | None:
    """The detections of a sample; None where shapes differ, or an output is not finite."""
    views = (layout.boxes, layout.scores) if layout.scores else (layout.boxes,)
    pairs = [(expected[view.name], actual[view.name]) for view in views]
    comparable = all(a.shape == b.shape and np.isfinite(b.astype(np.float64)).all() for a, b in pairs)
    return layout.compare(expected, actual) if comparable else None
