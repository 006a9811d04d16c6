"""Which outputs become pictures, and what their pixels say."""

import numpy as np
import pytest
from tables import values

from rewriter.ir.model import Array
from rewriter.runtime.metrics.pairwise_error import Pair
from rewriter.runtime.metrics.pictures import Picture, WorstOutputs, best_boxes, picture_of

NAN = np.nan


def ramp(shape: tuple[int, ...]) -> Array:
    return np.linspace(0.0, 1.0, int(np.prod(shape)), dtype=np.float32).reshape(shape)


def shown(expected: Array, actual: Array) -> Picture:
    picture = picture_of("y", Pair(expected, actual))
    assert picture is not None
    return picture


@values
def test_an_output_of_this_shape_is_an_image(shape: tuple[int, ...], size: tuple[int, int] | None) -> None:
    picture = picture_of("y", Pair(ramp(shape), ramp(shape)))
    assert (picture and picture.size) == size


@pytest.mark.parametrize(("side", "drawn"), [(256, 256), (257, 129), (512, 256), (513, 171)])
def test_large_images_are_thinned(side: int, drawn: int) -> None:
    picture = shown(ramp((1, 1, 100, side)), ramp((1, 1, 100, side)))
    assert picture.expected.shape[1] == picture.actual.shape[1] == picture.difference.shape[1] == drawn
    assert picture.size == (100, side)


@pytest.mark.parametrize(
    ("dtype", "drawn"), [(np.float16, True), (np.uint8, True), (np.int64, False), (np.bool_, False)]
)
def test_floats_and_bytes_are_drawn(dtype: type[np.generic], drawn: bool) -> None:
    image = np.eye(16)[None, None].astype(dtype)
    assert (picture_of("y", Pair(image, image)) is not None) is drawn


def test_pixels_go_from_the_least_to_the_largest_value_of_the_original() -> None:
    expected = np.zeros((1, 1, 16, 16), np.float32)
    expected[0, 0, 0, :5] = -1.0, 3.0, 1.0, NAN, np.inf
    actual = expected.copy()
    actual[0, 0, 0, :3] = -2.0, 4.0, 2.0
    picture = shown(expected, actual)
    assert (picture.low, picture.high) == (-1.0, 3.0)
    assert picture.expected[0, :6].tolist() == [0, 255, 128, 255, 255, 64]
    assert picture.actual[0, :3].tolist() == [0, 255, 191], "beyond the original's values there is no more"
    assert picture.expected.dtype.name == picture.actual.dtype.name == "uint8"


def test_the_difference_has_the_largest_channel_and_its_own_scale() -> None:
    expected = np.zeros((1, 3, 16, 16), np.float32)
    expected[0, 0, 9, 9] = 1.0
    actual = expected.copy()
    actual[0, :, 0, 0] = 0.1, -0.5, 0.2
    actual[0, 2, 0, 1] = 0.25
    picture = shown(expected, actual)
    assert picture.largest == 0.5
    assert picture.difference.shape == (16, 16)
    assert picture.difference[0, :3].tolist() == [255, 128, 0]


def test_equal_images_have_no_difference_and_flat_ones_no_contrast() -> None:
    flat = np.full((1, 1, 16, 16), 7.0, np.float32)
    picture = shown(flat, flat)
    assert picture.largest == 0.0 and not picture.difference.any() and not picture.expected.any()
    half = shown(flat, flat + np.float32(0.5))
    assert (half.actual == 128).all(), "the unit of a flat image is 1"
    assert (half.largest, half.difference.min()) == (0.5, 255)


def test_the_first_image_of_a_batch_is_drawn_with_its_channels_last() -> None:
    batch = np.zeros((2, 3, 16, 20), np.float32)
    batch[0, 1, 2, 3], batch[1, 0, 0, 0] = 1.0, 1.0
    picture = shown(batch, batch)
    assert np.argwhere(picture.expected).tolist() == [[2, 3, 1]]


def test_what_cannot_be_compared_is_no_picture() -> None:
    image = ramp((1, 1, 16, 16))
    assert picture_of("y", Pair(image, image[:, :, :, :15])) is None
    assert picture_of("y", Pair(image * np.float32(NAN), image)) is None


IMAGE = np.zeros((1, 1, 16, 16), np.float32)
IMAGE[0, 0, 0, 0] = 1.0


def off(error: float) -> Pair:
    return Pair(IMAGE, IMAGE + np.float32(error))


def test_the_worst_sample_of_each_output_is_kept_with_its_picture() -> None:
    found = WorstOutputs()
    for sample, error in enumerate((0.25, 0.5, 0.125)):
        found.add("y", off(error), sample=sample, build=1)
    found.add("score", Pair(np.ones(4), np.ones(4)))
    assert [(one.name, one.sample, one.build) for one in found.statistics] == [("y", 1, 1), ("score", 0, 0)]
    assert [(one.name, one.largest) for one in found.pictures] == [("y", 0.5)]


def test_of_equal_ones_the_first_is_kept() -> None:
    found = WorstOutputs()
    found.add("y", off(0.25), sample=0)
    found.add("y", off(0.25), sample=1)
    assert [one.sample for one in found.statistics] == [0]


def test_a_pair_of_two_shapes_is_left_out() -> None:
    found = WorstOutputs()
    found.add("y", Pair(IMAGE, IMAGE[:, :, :8]))
    assert (found.statistics, found.pictures) == ((), ())


def test_boxes_of_six_columns_are_ordered_by_the_score_before_the_class() -> None:
    rows = np.array([[[0, 0, 1, 1, 0.2, 7], [2, 2, 3, 3, 0.9, 1]]], np.float32)
    boxes = best_boxes("y", {"y": rows})
    assert boxes is not None and boxes.tolist() == [[2, 2, 3, 3], [0, 0, 1, 1]]


BOXES = np.array([[0, 0, 9, 9], [20, 20, 39, 39], [40, 40, 59, 59], [5, 5, 8, 8], [6, 6, 9, 9]], np.float32)
SCORES = np.array([0.2, 0.9, 0.5, 0.3, 0.1], np.float32)
LABELS = np.array([3, 1, 2, 0, 0])
CLASSES = np.stack([SCORES / 2, SCORES], 1)


def _rows(*columns: np.ndarray) -> np.ndarray:
    return np.concatenate([c.reshape(len(BOXES), -1) for c in columns], 1).astype(np.float32)


@pytest.mark.parametrize(
    "outputs",
    [
        pytest.param({"y": BOXES, "labels": LABELS, "scores": SCORES}, id="without a batch axis"),
        pytest.param({"scores": SCORES[None], "y": BOXES[None]}, id="scores before boxes"),
        pytest.param(
            {"classes": LABELS[None] * np.float32(1), "scores": SCORES[None], "y": BOXES[None]},
            id="float classes",
        ),
        pytest.param({"y": BOXES[:, None], "scores": CLASSES[:, None]}, id="the batch in the middle"),
        pytest.param({"y": BOXES.T[None], "scores": CLASSES.T[None]}, id="coordinates before boxes"),
        pytest.param({"y": _rows(BOXES, SCORES, LABELS)[None]}, id="score and class in a row"),
        pytest.param({"y": _rows(0 * SCORES, BOXES, LABELS, SCORES)}, id="image and score in a row"),
        pytest.param({"y": np.tile(_rows(BOXES, CLASSES).T, (1, 1, 2))[:, :, :7]}, id="YOLO: classes first"),
        pytest.param({"y": np.tile(_rows(BOXES, SCORES, CLASSES), (2, 1))[None, :9]}, id="YOLO: objectness"),
    ],
)
def test_the_best_boxes_are_found_in_any_order_of_outputs_and_axes(outputs: dict[str, Array]) -> None:
    boxes = best_boxes("y", outputs)
    assert boxes is not None and boxes[0].tolist() == [20, 20, 39, 39]


@pytest.mark.parametrize(
    "outputs",
    [
        pytest.param(
            {"y": np.random.default_rng(0).normal(size=(1, 16, 64)).astype(np.float32)}, id="hidden states"
        ),
        pytest.param({"y": BOXES}, id="boxes without scores"),
        pytest.param({"y": np.full((1, 10), 0.1, np.float32)}, id="probabilities"),
    ],
)
def test_what_holds_no_boxes_has_none(outputs: dict[str, Array]) -> None:
    assert best_boxes("y", outputs) is None
