"""The worst sample and build of each output: its figures, and a small picture where it is an image."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rewriter.ir.model import Array
from rewriter.runtime.metrics.detections import layouts
from rewriter.runtime.metrics.outputs import OutputStatistics, statistics
from rewriter.runtime.metrics.pairwise_error import Pair, is_float

SMALLEST_SIDE = 16  # pixels of the shorter side below which nothing is to be seen

LARGEST_SIDE = 256  # pixels of the longer side of a picture; larger outputs are thinned

MOST_ASPECT = 8
"""Longest side in units of the shorter one: hidden states [batch, tokens, features] are longer as a rule."""

COLOURS = (1, 3)

MOST_BOXES = 12  # boxes of an output, those with the highest scores

MOST_WORDS = 24  # tokens of an output; of one row of classes the best three


@dataclass(frozen=True, eq=False)
class Picture:
    """The first image of an output: original, result, and where they differ, with 8 bits per channel."""

    name: str
    # expected, actual: [height, width] or [height, width, 3], uint8
    expected: Array
    actual: Array
    difference: Array  # [height, width], uint8: largest absolute difference of the channels
    # low, high: values of the output shown as 0 and 255
    low: float
    high: float
    largest: float  # difference shown as 255; 0.0 if there is none
    size: tuple[int, int]  # height and width of the output, before it was thinned


def picture_of(name: str, pair: Pair) -> Picture | None:
    """Returns the output as pictures; None if it does not look like an image.

    Images are floats or uint8 of [.., C, H, W] or [.., H, W, C] with 1 or 3 channels, or [1, H, W].
    """
    if not pair.same_shape or not (is_float(pair.expected) or pair.expected.dtype == np.uint8):
        return None
    whole, other = _as_image(pair.expected), _as_image(pair.actual)
    if whole is None or other is None:
        return None
    expected, actual = images = _thinned(whole), _thinned(other)
    finite = expected[np.isfinite(expected)]
    if not finite.size:
        return None
    low, high = float(finite.min()), float(finite.max())
    with np.errstate(invalid="ignore"):
        difference = np.abs(actual - expected).max(axis=-1)
    largest = float(difference[np.isfinite(difference)].max(initial=0.0))
    left, right = (_bytes(image, low, high) for image in images)
    size = (whole.shape[0], whole.shape[1])
    return Picture(name, left, right, _bytes(difference, 0.0, largest), low, high, largest, size)


def pixels_of(array: Array, low: float, high: float) -> Array | None:
    """Returns the first image of an array with 8 bits per channel; None if it does not look like one."""
    image = _as_image(array)
    return None if image is None else _bytes(_thinned(image), low, high)


def _as_image(array: Array) -> Array | None:
    """The first image as [height, width, channels]; None if the array does not look like one."""
    if array.ndim < 3 or not array.size:
        return None
    image = array.reshape(-1, *array.shape[-3:])[0]
    image = np.moveaxis(image, 0, -1) if image.shape[0] in COLOURS else image
    *sides, colours = image.shape
    looks = min(sides) >= SMALLEST_SIDE and max(sides) <= MOST_ASPECT * min(sides)
    return image if looks and colours in COLOURS else None


def _thinned(image: Array) -> Array:
    """Every k-th pixel in float64, so that the longer side fits."""
    step = -(-max(image.shape[:2]) // LARGEST_SIDE)
    return np.asarray(image[::step, ::step].astype(np.float64))


def _bytes(values: Array, low: float, high: float) -> Array:
    """Values as 0 to 255, without an axis of one channel; NaN is 255."""
    values = values.squeeze(-1) if values.shape[-1] == 1 else values
    scaled = (values - low) / ((high - low) or 1.0)
    return np.asarray(np.round(np.nan_to_num(np.clip(scaled, 0.0, 1.0), nan=1.0) * 255.0), np.uint8)


@dataclass
class WorstOutputs:
    """Collects outputs one by one, and keeps the worst of each name. No array of an output is kept."""

    _worst: dict[str, tuple[OutputStatistics, Picture | None]] = field(default_factory=dict)

    def add(self, name: str, pair: Pair, *, sample: int = 0, build: int = 0) -> None:
        """Adds one output of one sample and build; a pair of two shapes is left out."""
        if pair.same_shape:
            new = statistics(name, pair, sample=sample, build=build)
            if name not in self._worst or new.badness > self._worst[name][0].badness:
                self._worst[name] = new, picture_of(name, pair)

    @property
    def statistics(self) -> tuple[OutputStatistics, ...]:
        return tuple(figures for figures, _ in self._worst.values())

    @property
    def pictures(self) -> tuple[Picture, ...]:
        return tuple(picture for _, picture in self._worst.values() if picture is not None)


def best_boxes(name: str, outputs: Mapping[str, Array]) -> Array | None:
    """The boxes with the highest scores in the first image, [k, 4]; None if the output holds none.

    Scores come from any other output with one row for each box, or from the rows themselves: [N, 6] with
    score and class, [N, 7] with the image first and the score last, [4 + classes, N] or [N, 5 + classes].
    """
    images = [next(layout.read(outputs)) for layout in layouts(outputs) if layout.boxes.name == name]
    if not images:
        return None
    boxes = max(images, key=lambda image: image.has_probabilities)  # the first of equals
    order = np.argsort(-np.nan_to_num(boxes.best, nan=-np.inf), kind="stable")[:MOST_BOXES]
    return np.asarray(boxes.corners[order][np.isfinite(boxes.corners[order]).all(axis=1)])


def best_classes(array: Array) -> list[str]:
    """Best class of each row, or the best three of a single row; whole numbers are tokens already."""
    if array.dtype.kind in "iu":
        return [str(token) for token in array.reshape(-1)[:MOST_WORDS].tolist()]
    rows = array.reshape(-1, array.shape[-1])
    if len(rows) == 1:
        return [str(index) for index in np.argsort(-rows[0], kind="stable")[:3].tolist()]
    return [str(index) for index in rows[:MOST_WORDS].argmax(axis=-1).tolist()]
