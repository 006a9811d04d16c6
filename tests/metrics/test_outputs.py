"""Comparison by value: equal and unequal outputs, and rows as sets."""

import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from graphs import graph
from tables import values

from rewriter.base.errors import UsageError
from rewriter.ir.model import Array
from rewriter.runtime.metrics.metrics import METRICS, named
from rewriter.runtime.metrics.outputs import OutputComparison, compare, statistics, worst_of_samples
from rewriter.runtime.metrics.pairwise_error import Pair, degenerate, relative_l2
from rewriter.runtime.metrics.row_errors import assignment, row_groups
from rewriter.runtime.metrics.tolerances import TOLERANCES, precision_of

NAN, INF = np.nan, np.inf


def floats(*values: float) -> Array:
    return np.asarray(values, np.float32)


def fp8(*values: float) -> Array:
    return np.asarray(values, ml_dtypes.float8_e4m3fn)


def one(expected: Array, actual: Array, tolerance: float = 1e-3) -> OutputComparison:
    return compare({"y": expected}, {"y": actual}, tolerance)[0][0]


@pytest.mark.parametrize(
    ("expected", "actual", "passed"),
    [
        pytest.param(floats(1, 2), floats(1, 2), True, id="equal"),
        pytest.param(floats(1, 2), floats(1, 2.001), True, id="within the tolerance"),
        pytest.param(floats(1, 2), floats(1, 2.1), False, id="beyond the tolerance"),
        pytest.param(floats(1, 2), floats(0, 0), False, id="finite, but entirely wrong"),
        pytest.param(floats(1, 2), floats(1, NAN), False, id="a NaN that the reference lacks"),
        pytest.param(floats(1, 2), floats(1, INF), False, id="an infinity that the reference lacks"),
        pytest.param(floats(1, -INF), floats(1, -INF), True, id="a mask's -inf is a value"),
        pytest.param(floats(1, -INF), floats(1, INF), False, id="an infinity with the other sign"),
        pytest.param(floats(1, -INF), floats(1, -65504), False, id="a finite number for an infinity"),
        pytest.param(floats(1, NAN), floats(1, NAN), True, id="NaN in both"),
        pytest.param(floats(NAN, NAN), floats(NAN, NAN), True, id="only NaN in both"),
        pytest.param(fp8(1, NAN), fp8(1, NAN), True, id="NaN in both, in FP8"),
        pytest.param(fp8(1, 2), fp8(1, 3), False, id="beyond the tolerance, in FP8"),
        pytest.param(floats(NAN, 1), floats(0, 1), False, id="a number for a NaN"),
        pytest.param(floats(0, 0), floats(0, 0), True, id="zeros"),
        pytest.param(floats(0, 0), floats(0, 1e-4), True, id="zero reference: absolute, small"),
        pytest.param(floats(0, 0), floats(0, 1), False, id="zero reference: absolute, large"),
        pytest.param(floats(), floats(), True, id="no elements"),
        pytest.param(floats(1, 2), floats(1), False, id="another shape"),
        pytest.param(floats(1, 2), floats(1, 2).reshape(1, 2), False, id="another rank that would broadcast"),
        pytest.param(np.arange(4), np.arange(4), True, id="equal integers"),
        pytest.param(np.arange(4), np.asarray([0, 1, 2, 9]), False, id="one integer of four differs"),
        pytest.param(np.arange(2000), np.r_[np.arange(1999), 0], True, id="one integer of 2000 differs"),
        pytest.param(np.zeros(0, np.int64), np.zeros(0, np.int64), True, id="no integers"),
        pytest.param(np.asarray([True]), np.asarray([False]), False, id="booleans"),
        pytest.param(np.asarray(["a"], object), np.asarray(["a"], object), True, id="strings"),
        pytest.param(floats(1, 2), floats(1, 2).astype(ml_dtypes.bfloat16), True, id="BF16 against FP32"),
        pytest.param(floats(3e38, 1), floats(3e38, 1), True, id="squares beyond FP32"),
    ],
)
def test_one_output_passes_or_fails(expected: Array, actual: Array, passed: bool) -> None:
    assert one(expected, actual).passed is passed


def test_errors_of_one_output() -> None:
    found = one(floats(3, 4), floats(3, 5), tolerance=0.1)
    assert found.relative_l2 == pytest.approx(0.2)
    assert found.max_abs == 1.0
    assert found.cosine == pytest.approx(29 / (5 * np.sqrt(34)))
    assert relative_l2(floats(0, 0), floats(3, 4)) == 5.0
    counted = one(np.arange(4), np.asarray([0, 1, 2, 9]), 0.1)
    assert (counted.relative_l2, counted.note) == (0.25, "share of differing elements")


def test_the_worst_of_several_samples_counts() -> None:
    good, bad = one(floats(1), floats(1)), one(floats(1), floats(1.5))
    broken = one(floats(1), floats(NAN))
    assert worst_of_samples([(good,), (bad,), (good,)]) == (bad,)
    assert worst_of_samples([(bad,), (broken,)]) == (broken,)
    excused = one(floats(1), floats(2), tolerance=2.0)
    assert worst_of_samples([(excused,), (bad,)]) == (bad,), "it failed, with a smaller error"


def detections(rows: int = 40, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {
        "boxes": rng.random((2, rows, 4)).astype(np.float32),
        "scores": rng.random((2, rows)).astype(np.float32),
        "labels": rng.integers(0, 80, (2, rows)),
    }


def permuted(outputs: dict[str, Array], seed: int = 1) -> dict[str, Array]:
    order = np.random.default_rng(seed).permutation(outputs["boxes"].shape[1])
    return {name: array[:, order] for name, array in outputs.items()}


def changed(rows: int, count: int, by: float = 1.0) -> dict[str, Array]:
    """The detections in another order, `count` of their boxes moved."""
    actual = permuted(detections(rows))
    actual["boxes"][:, :count] += by
    return actual


def apart() -> dict[str, Array]:
    """Scores in another order than the boxes: rows are matched over all outputs together."""
    actual = permuted(detections())
    actual["scores"] = actual["scores"][:, ::-1]
    return actual


NUMBERS = {"y": np.arange(2049, dtype=np.float32)[None]}
MAPS = {"y": np.random.default_rng(0).random((1, 8, 3, 3)).astype(np.float32)}
SETS = [
    pytest.param(detections(), permuted(detections()), True, True, id="another order"),
    pytest.param(detections(), permuted(detections()), False, False, id="another order, not as a set"),
    pytest.param(detections(), apart(), True, False, id="an output in an order of its own"),
    pytest.param(detections(), detections(seed=7), True, False, id="another set"),
    pytest.param(detections(), changed(40, 2), True, True, id="two rows of forty"),
    pytest.param(detections(), changed(40, 3), True, False, id="three rows of forty"),
    pytest.param(detections(3), changed(3, 0), True, True, id="three rows"),
    pytest.param(detections(3), changed(3, 1), True, False, id="one row of three"),
    pytest.param(detections(), changed(40, 1, NAN), True, False, id="one NaN"),
    pytest.param(MAPS, {"y": MAPS["y"][:, ::-1]}, True, False, id="feature maps"),
    pytest.param(NUMBERS, {"y": NUMBERS["y"][:, ::-1]}, True, False, id="too many rows"),
]


@pytest.mark.parametrize(("expected", "actual", "as_sets", "passed"), SETS)
def test_rows_are_a_set(
    expected: dict[str, Array], actual: dict[str, Array], as_sets: bool, passed: bool
) -> None:
    found = [
        one
        for one, _ in compare(
            expected, actual, 1e-3, as_sets=dict.fromkeys(expected, (1,)) if as_sets else None
        )
    ]
    assert all(c.passed for c in found) is passed
    if passed and len(expected["scores"][0]) == 40:
        assert all(c.note.startswith("rows matched as sets, best 38 of 40") for c in found)


def test_outputs_count_in_units_of_their_own() -> None:
    """Boxes in pixels are alike and noisy, so that the scores tell which is which."""
    rng = np.random.default_rng(0)
    scores, order = rng.random((1, 40)), rng.permutation(40)
    boxes = [1000.0 + 0.3 * rng.standard_normal((1, 40, 4)) for _ in range(2)]
    expected = {"boxes": boxes[0], "scores": scores}
    actual = {"boxes": boxes[1], "scores": scores[:, order]}
    assert all(c.passed for c, _ in compare(expected, actual, 1e-3, as_sets=dict.fromkeys(expected, (1,))))


@values
def test_rows_that_may_be_a_set(shape: tuple[int, ...], is_group: bool) -> None:
    output = {"y": np.zeros(shape)}
    axes = {"y": (1,)}
    assert row_groups(output, output, axes) == ([(1, ["y"])] if is_group else [])
    assert row_groups(output, {"y": np.zeros((*shape[:-1], shape[-1] + 1))}, axes) == [], "another shape"


def test_outputs_with_as_many_rows_are_one_group() -> None:
    one, other = np.zeros((1, 40, 4)), np.zeros((1, 41))
    outputs = {"boxes": one, "others": other, "scores": one[..., 0], "labels": np.zeros((1, 40), np.int64)}
    axes = dict.fromkeys(outputs, (1,))
    assert row_groups(outputs, outputs, axes) == [(1, ["boxes", "scores", "labels"]), (1, ["others"])]
    broken = outputs | {"scores": np.full((1, 40), np.inf)}
    assert row_groups(outputs, broken, axes) == [(1, ["others"])], "a row of a group could hide it"


@pytest.mark.parametrize(("error", "passed"), [(1.9e-3, True), (2.1e-3, False)])
def test_a_set_may_err_by_twice_the_tolerance(error: float, passed: bool) -> None:
    expected = {"y": np.ones((1, 2, 4)) * np.asarray([1.0, 3.0])[None, :, None]}
    actual = {"y": expected["y"][:, ::-1] * (1.0 + error)}
    ((found, _),) = compare(expected, actual, 1e-3, as_sets=dict.fromkeys(expected, (1,)))
    assert found.relative_l2 == pytest.approx(error) and found.passed is passed


@values
def test_the_excess_is_the_error_over_the_tolerance(error: float, tolerance: float, excess: float) -> None:
    assert OutputComparison("y", error, 1.0, 1.0, True, tolerance).excess == excess
    assert OutputComparison("y", error, 1.0, 1.0, False, tolerance).excess == math.inf


@pytest.mark.parametrize(
    ("expected", "note"),
    [
        pytest.param(floats(0, 0), "the original gives 0 throughout", id="zeros"),
        pytest.param(floats(1e-40, -2e-40), "the original gives no value above 2e-40", id="subnormal"),
        pytest.param(floats(0, 2.0**-126), "", id="the smallest normal number"),
        pytest.param(floats(NAN, NAN), "", id="nothing finite"),
        pytest.param(floats(), "", id="no elements"),
        pytest.param(np.zeros(2, np.int64), "", id="integers, for which 0 is a value"),
    ],
)
def test_an_output_without_relative_errors_is_reported(expected: Array, note: str) -> None:
    assert one(expected, expected).note.startswith(note)
    assert bool(one(expected, expected).note) == bool(note) or expected.dtype.kind == "i"


def test_a_whole_number_of_any_rank_has_a_relative_error() -> None:
    assert degenerate(np.array(7)) == degenerate(np.zeros(2, np.int64)) == ""


def test_figures_of_an_output() -> None:
    expected = np.array([[3.0, 4.0], [0.0, 12.0]], np.float32)
    actual = np.array([[3.0, 4.0], [0.0, 13.0]], np.float16)
    found = statistics("y", Pair(expected, actual), sample=2, build=1)
    assert (found.name, found.sample, found.build, found.not_finite) == ("y", 2, 1, 0)
    assert found.relative_l2 == pytest.approx(1 / 13)
    assert (found.max_abs, found.at, found.expected, found.actual) == (1.0, (1, 1), 12.0, 13.0)
    assert found.psnr == pytest.approx(20 * math.log10(12 / 0.5))
    shares = statistics("y", Pair(np.zeros(1001), -np.arange(1001.0))).percentiles
    assert shares == pytest.approx({"50": 500.0, "90": 900.0, "99": 990.0, "99.9": 999.0})
    same = statistics("y", Pair(np.ones((0, 3), bool), np.ones((0, 3), bool)))
    assert (same.max_abs, same.psnr, same.at, same.percentiles) == (0.0, math.inf, (), {})
    assert statistics("y", Pair(np.array([1, 2, 3]), np.array([1, 2, 5]))).at == (2,)


def test_non_finite_values_are_found_except_equal_infinities() -> None:
    expected = np.array([1.0, -np.inf, np.nan, 2.0])
    same = statistics("y", Pair(expected, np.array([1.0, -np.inf, np.nan, 2.5])))
    assert (same.not_finite, same.max_abs, same.at) == (0, 0.5, (3,))
    broken = statistics("y", Pair(expected, np.array([1.0, np.inf, np.nan, np.nan])))
    assert (broken.not_finite, broken.max_abs, broken.relative_l2) == (2, math.inf, math.inf)
    assert (broken.at, broken.psnr) == ((1,), -math.inf)
    assert (Pair(expected, expected[::-1]).squares, Pair(expected, -expected).cosine) == (
        (math.inf, 1.0),
        0.0,
    )
    assert Pair(floats(3, 4), floats(3, 5)).squares == (1.0, 25.0)


def _swapped_rows() -> Array:
    points = np.random.default_rng(3).normal(size=(300, 8))
    others = points[np.roll(np.arange(300), 7)] + 1e-3
    return np.asarray(((points[:, None] - others[None]) ** 2).sum(axis=2))


@pytest.mark.parametrize(
    "cost",
    [
        np.array([[5.0]]),
        np.array([[1.0, 2.0], [1.0, 9.0]]),
        np.zeros((6, 6)),
        np.random.default_rng(0).random((60, 60)),
        np.random.default_rng(1).integers(0, 3, (40, 40)).astype(np.float64),
        np.random.default_rng(2).normal(size=(40, 40)) * 1e6,
        _swapped_rows(),
    ],
    ids=["one row", "two rows want one column", "all alike", "random", "many ties", "negative", "detections"],
)
def test_the_total_cost_is_the_least(cost: Array) -> None:
    optimize = pytest.importorskip("scipy.optimize", reason="SciPy is not installed: pip install '.[dev]'")
    columns = assignment(cost)
    assert sorted(columns) == list(range(len(cost)))
    rows, best = optimize.linear_sum_assignment(cost)
    assert np.isclose(cost[np.arange(len(cost)), columns].sum(), cost[rows, best].sum(), rtol=1e-12)


FP32 = "g (float[2] x) => (float[2] y) { y = Relu(x) }"
FP16 = "g (float[2] x) => (float[2] y) { a = Cast<to = 10>(x) b = Relu(a) y = Cast<to = 1>(b) }"
BF16 = "g (float[2] x) => (float[2] y) { a = Cast<to = 16>(x) y = Cast<to = 1>(a) }"
BOTH = "g (float[2] x) => (float[2] y) { h = Cast<to = 10>(x) a = Cast<to = 16>(h) y = Cast<to = 1>(a) }"

TABLE = [
    pytest.param(FP32, "fp32", 1e-4, id="FP32"),
    pytest.param(FP16, "fp16", 5e-3, id="FP16"),
    pytest.param(BF16, "bf16", 4e-2, id="BF16"),
    pytest.param(BOTH, "bf16", 4e-2, id="the coarsest of two"),
]


@pytest.mark.parametrize(("text", "precision", "value"), TABLE)
def test_the_coarsest_type_decides(text: str, precision: str, value: float) -> None:
    assert precision_of(graph(text)) == precision
    assert TOLERANCES[precision].value == value


FLAT = {name: array[0] for name, array in detections().items()}
"""The detections of one image, without a batch."""


@pytest.mark.parametrize("axes", [(0,), (0, 1)])
def test_rows_without_a_batch_are_a_set(axes: tuple[int, ...]) -> None:
    order = np.random.default_rng(1).permutation(40)
    other = {name: array[order] for name, array in FLAT.items()}
    found = [one for one, _ in compare(FLAT, other, 1e-3, as_sets=dict.fromkeys(FLAT, axes))]
    assert all(one.passed and one.note.startswith("rows matched as sets") for one in found)
    moved = {**other, "boxes": other["boxes"] + 0.1}
    assert not all(one.passed for one, _ in compare(FLAT, moved, 1e-3, as_sets=dict.fromkeys(FLAT, axes)))
    turned = {**FLAT, "boxes": FLAT["boxes"][:, ::-1]}
    assert not all(one.passed for one, _ in compare(FLAT, turned, 1e-3, as_sets=dict.fromkeys(FLAT, axes))), (
        "corners are no rows"
    )
    apart = {**other, "scores": FLAT["scores"]}
    assert not all(one.passed for one, _ in compare(FLAT, apart, 1e-3, as_sets=dict.fromkeys(FLAT, axes)))


def test_best_values_of_a_batch_stay_with_their_item() -> None:
    """[64, 5] is as wide as a box: the number of a TopK decides, or an output of as many rows and columns."""
    rng = np.random.default_rng(0)
    best = {"y": rng.random((64, 5))}
    within, across = {"y": best["y"][:, ::-1]}, {"y": best["y"][::-1]}
    assert compare(best, within, 1e-3, as_sets={"y": (1,)})[0][0].passed
    assert not compare(best, across, 1e-3, as_sets={"y": (1,)})[0][0].passed
    deep = {"boxes": rng.random((64, 5, 3))}
    assert row_groups(best | deep, best | deep, dict.fromkeys(best | deep, (0, 1))) == [(1, ["y", "boxes"])]


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


@values
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
