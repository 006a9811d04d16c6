"""Every metric on outputs with a known value."""

import math
from pathlib import Path

import numpy as np
import pytest
from tables import values

from rewriter.base.errors import UsageError
from rewriter.ir.model import Array
from rewriter.runtime.metrics.metrics import METRICS, named

A = np.asarray([[3.0, 4.0], [0.0, 0.0]], np.float32)
ROWS = np.asarray([[5, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5]], np.float32)
MASK = np.asarray([-np.inf, 1.0], np.float32)
SWAPPED = np.asarray([[4, 5, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5]], np.float32)


@pytest.mark.parametrize(
    ("name", "expected", "actual", "value"),
    [
        pytest.param("relative-l2", A, A + np.asarray([[0, 0], [0, 0.5]], np.float32), 0.1, id="relative L2"),
        pytest.param("max-abs", A, A - np.asarray([[0.5, 0.25], [0, 0]], np.float32), 0.5, id="maximum"),
        pytest.param("max-abs", A[:0], A[:0], 0.0, id="no elements"),
        pytest.param("cosine", A, 7 * A, 1.0, id="a multiple has the same direction"),
        pytest.param("cosine", A, A[:, ::-1], 24 / 25, id="an angle"),
        pytest.param("cosine", 0 * A, 0 * A, 1.0, id="two zeros agree"),
        pytest.param("cosine", 0 * A, A, 0.0, id="zero and another value differ"),
        pytest.param("psnr", A, A + np.float32(0.04), 40.0, id="1 percent of the span is 40 dB"),
        pytest.param("psnr", A, A, math.inf, id="equal images"),
        pytest.param("top-1", ROWS, SWAPPED, 0.5, id="one of two rows has another winner"),
        pytest.param("top-5", ROWS, SWAPPED, 1.0, id="the same five in another order"),
        pytest.param("top-1", ROWS[0], SWAPPED[0], 0.0, id="one row"),
        pytest.param("relative-l2", np.asarray([3, 4]), np.asarray([3, 3]), 0.2, id="integers"),
        pytest.param("relative-l2", MASK, MASK, 0.0, id="an infinity of the original is a value"),
        pytest.param("relative-l2", MASK, np.maximum(MASK, -65504), math.inf, id="an infinity that is lost"),
        pytest.param("top-1", np.asarray(3.0), np.asarray(4.0), 1.0, id="a number is a row of one"),
        pytest.param("top-1", np.zeros((0, 4)), np.zeros((0, 4)), 1.0, id="no rows"),
        pytest.param("top-1", np.asarray([[1.0, 1.0, 0.0]]), np.asarray([[1.0, 1.0, 0.0]]), 1.0, id="a tie"),
        pytest.param("top-1", np.asarray([[1.0, 1.0, 0.0]]), np.asarray([[0.9, 1.0, 0.0]]), 0.0, id="tie"),
        pytest.param("psnr", np.ones(4), np.asarray([1, 1, 1, 1.5]), 20 * math.log10(4), id="a flat image"),
    ],
)
def test_metrics_have_the_known_value(name: str, expected: Array, actual: Array, value: float) -> None:
    found = METRICS[name].worst({"y": expected}, {"y": actual})
    assert found == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("name", METRICS)
def test_the_worst_output_counts_and_nan_is_worse(name: str) -> None:
    metric = METRICS[name]
    good, bad = {"a": ROWS, "b": ROWS}, {"a": ROWS, "b": -ROWS}
    assert metric.worst(good, good) != metric.worst(good, bad)
    assert metric.meets(metric.worst(good, good), metric.worst(good, bad))
    assert not metric.meets(metric.worst(good, bad), metric.worst(good, good))
    broken = {"a": ROWS, "b": np.where(ROWS == 3, np.float32(np.nan), ROWS)}
    assert not metric.meets(metric.worst(good, broken), metric.worst(good, bad))


@pytest.mark.parametrize(
    ("name", "value", "tolerance", "met"),
    [
        pytest.param("relative-l2", 0.5, 0.5, True, id="an error at its limit"),
        pytest.param("relative-l2", 0.51, 0.5, False, id="an error beyond it"),
        pytest.param("psnr", 40.0, 40.0, True, id="a quality at its limit"),
        pytest.param("psnr", 39.9, 40.0, False, id="a quality below it"),
    ],
)
def test_the_tolerance_itself_is_met(name: str, value: float, tolerance: float, met: bool) -> None:
    metric = METRICS[name]
    assert metric.meets(value, tolerance) is met
    assert metric.worst_of([value, tolerance, value]) == (min if metric.least else max)(value, tolerance)
    assert metric.worst_of([]) is None


BOXES = np.random.default_rng(0).standard_normal((1, 20, 4)).astype(np.float32)
SCORES = BOXES[:, :, 0].copy()


def test_detections_are_matched_as_a_set() -> None:
    order = np.random.default_rng(1).permutation(20)
    expected, shuffled = {"b": BOXES, "s": SCORES}, {"b": BOXES[:, order], "s": SCORES[:, order]}
    metric = METRICS["detections"]
    assert metric.worst(expected, shuffled) == 0.0
    assert METRICS["relative-l2"].worst(expected, shuffled) > 0.5
    moved = {name: array + np.float32(0.01) for name, array in shuffled.items()}
    assert 0.001 < metric.worst(expected, moved) < 0.02
    assert metric.worst(expected, {**shuffled, "s": SCORES * np.float32(np.nan)}) == math.inf


OWN = """
import numpy as np

def largest(expected, actual):
    return max(float(np.abs(expected[k] - actual[k]).max()) for k in expected)

def agreement(expected, actual):
    return float(np.mean(expected["y"].argmax(-1) == actual["y"].argmax(-1)))

agreement.least = True

def failing(expected, actual):
    return expected["nothing"]

def nan(expected, actual):
    return float("nan")

nan.least = True
number = 3
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own metric.py"
    path.write_text(OWN)
    return path


def test_a_user_function_from_a_file(own: Path) -> None:
    expected, actual = {"y": ROWS}, {"y": SWAPPED}
    assert named(f"{own}:largest").worst(expected, actual) == 1.0
    assert not named(f"{own}:largest").least
    more = named(f"{own}:agreement")
    assert (more.worst(expected, actual), more.least) == (0.5, True)
    assert more.meets(0.9, 0.8) and not more.meets(0.7, 0.8)
    assert named(f"{own}:nan").worst(expected, actual) == -math.inf
    assert named("math:dist").least is False, "from a module"


@values
def test_an_unknown_metric_is_refused(name: str, words: str, own: Path) -> None:
    with pytest.raises(UsageError, match=rf"(?s)`metric.*{words}|{words}.*`metric"):
        named(name.replace("OWN", str(own)))


def test_the_error_of_a_failing_function_names_it(own: Path) -> None:
    with pytest.raises(UsageError, match=r"(?s)own metric.py:failing.*KeyError"):
        named(f"{own}:failing").worst({"y": ROWS}, {"y": ROWS})
