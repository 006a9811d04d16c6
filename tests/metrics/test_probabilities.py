"""Outputs of probabilities are found by the end of the graph, and judged by differences of probabilities."""

import math
from dataclasses import replace

import numpy as np
import pytest
from graphs import cases, graph
from tables import values

from rewriter.ir.model import Array
from rewriter.report.checks import distances, fair_text, scores_text
from rewriter.runtime.metrics.outputs import OutputComparison, compare
from rewriter.runtime.metrics.probabilities import (
    MapError,
    Probabilities,
    ProbabilityError,
    finds_nothing,
    map_error,
    probabilities,
)
from rewriter.runtime.metrics.tolerances import TOLERANCES, Tolerance
from rewriter.verification.compare_runs import Standard

SOFTMAX = Probabilities("Softmax(y) (Softmax) makes it", classes=-1)
FP16 = TOLERANCES["fp16"].value


@pytest.mark.parametrize(
    ("body", "found"),
    [
        pytest.param("y = Softmax(x)", SOFTMAX, id="softmax"),
        pytest.param("s = Softmax(x) y = Identity(s)", -1, id="behind an Identity"),
        pytest.param("y = Softmax<axis = 1>(x)", -2, id="over another axis"),
        pytest.param("s = Sigmoid(x) y = Transpose(s)", None, id="sigmoid behind a view"),
        pytest.param("a = Sigmoid(x) b = Sigmoid(x) y = Concat<axis = 0>(a, b)", None, id="joined scores"),
    ],
)
def test_the_end_of_the_graph_shows_probabilities(body: str, found: Probabilities | int | None) -> None:
    known = probabilities(graph(f"g (float[2,3,4] x) => (float[P,Q,R] y) {{ {body} }}"))
    assert known["y"] == found if isinstance(found, Probabilities) else known["y"].classes == found


@values
def test_other_outputs_are_judged_by_their_relative_error(body: str) -> None:
    assert not probabilities(graph(f"g (float[2,4,4] x) => (float[P,4,4] y) {{ {body} }}"))


@pytest.mark.parametrize(
    "scores", ["s = Sigmoid(x)", "a = Sigmoid(x) b = Softmax(x) c = Identity(b) s = Mul(a, c)"]
)
def test_boxes_and_scores_in_one_tensor_are_partly_probabilities(scores: str) -> None:
    model = graph(f"g (float[2,4,4] x) => (float[P,4,4] y) {{ {scores} y = Concat<axis = 0>(s, x) }}")
    assert probabilities(model)["y"].partly


@values
def test_whole_numbers_of_floats_are_rounded(body: str, rounded: bool) -> None:
    types = {"QuantizeLinear": "uint8", "<to = 6>(b": "int32", "y = Cast<to = 6>(a": "int32"}
    kind = next((kind for part, kind in types.items() if part in body), "int64")
    model = graph(f"g (float[2,3,4] x) => ({kind} y) <float[1,1,1] k = {{9.0}}> {{ {body} }}")
    assert [known.rounded for known in probabilities(model).values()] == [True] * rounded


def test_rounded_numbers_are_judged_by_their_distance_or_by_how_many_differ() -> None:
    rng = np.random.default_rng(0)
    sound = rng.integers(-20000, 20000, (1, 2, 500)).astype(np.int32)
    kind = Probabilities("", rounded=True)

    def verdicts(actual: Array) -> list[bool]:
        found = compare({"y": sound}, {"y": actual}, FP16, kinds={"y": kind}, parts={"y": ()})
        return [one.passed for one, _ in found]

    near = sound + rng.integers(-9, 10, sound.shape)
    quiet = np.stack([sound[:, 0], (sound[:, 1] * 0.8).astype(np.int32)], axis=1)
    assert all(verdicts(near.astype(np.int32)))
    assert not all(verdicts(quiet)) and not all(verdicts((sound * 1.02).astype(np.int32)))
    few = (rng.random(sound.shape) < 0.001).astype(np.int32)
    assert all(verdicts(np.where(few, 0, sound))), "one in a thousand is another number"


def judged(expected: Array, actual: Array, kind: Probabilities = SOFTMAX) -> OutputComparison:
    ((one, _),) = compare({"y": expected}, {"y": actual}, FP16, kinds={"y": kind})
    return one


SURE = np.array([[0.9, 0.06, 0.04], [0.1, 0.8, 0.1]])


def test_a_difference_that_no_threshold_sees_passes() -> None:
    shifted = SURE + np.array([-0.008, 0.004, 0.004])
    one = judged(SURE, shifted)
    assert one.relative_l2 > FP16 and one.passed
    assert one.probability is not None and one.probability.top_1 == 1.0
    assert one.probability.difference == pytest.approx(0.008)
    assert "the same best class in 100 % of the rows" in fair_text(
        one
    ) and "Softmax(y) (Softmax)" in fair_text(one)
    assert one.excess <= 1.0


SIGMOID = Probabilities("Sigmoid(y) (Sigmoid) makes it")


def blob(shift: float, size: int = 48) -> Array:
    """A disc whose edge is two pixels wide, moved to the right by a share of a pixel."""
    y, x = np.mgrid[:size, :size] - size / 2
    distance = np.hypot(x - shift, y) - size / 4
    found: Array = (1 / (1 + np.exp(4 * distance)))[None, None].astype(np.float32)
    return found


def test_a_map_whose_edges_move_by_a_share_of_a_pixel_passes() -> None:
    one = judged(blob(0.0), blob(0.05), SIGMOID)
    assert one.relative_l2 > FP16 and one.passed
    assert one.probability is not None and one.probability.areas is not None
    assert one.probability.difference > 0.04, "a single value would fail"
    assert 0.002 < one.probability.areas.distance < 0.01
    assert one.probability.areas.beyond == pytest.approx(0.0, abs=1e-3)
    assert "of the map's area differs, 0.01 allowed" in fair_text(one)


def hole(at: tuple[int, int], value: float) -> Array:
    found = blob(0.0)
    found[0, 0, at[0], at[1]] = value
    return found


def moved(by: float, rows: int = 2) -> Array:
    """`SURE`, many times, with one row of which this much moves from the best class to the second."""
    others = np.tile(SURE, (rows // 2, 1))
    others[0] += [-by, by, 0.0]
    return others


LOW = np.full((1, 100), 0.01)
SMALL = np.log([[0.999, 0.0009, 0.0001]])
LOGARITHMS = Probabilities("LogSoftmax", -1, logarithms=True)
ALONE = np.array([0.5, 0.05])
SCORES = np.random.default_rng(0).uniform(size=(1, 100, 80)).astype(np.float32)


def tied(first: float, second: float) -> Array:
    """A thousand rows; the first moves by a share, and in the second the other class of a tie wins."""
    rows = moved(first, 1000)
    rows[1] = [0.45 - second, 0.445 + second, 0.105]
    return rows


LIMITS = [
    pytest.param(SURE, SURE + np.array([-0.0099, 0.005, 0.0049]), SOFTMAX, True, id="rows: a hundredth"),
    pytest.param(SURE, SURE + np.array([-0.0101, 0.005, 0.0051]), SOFTMAX, False, id="rows: more than that"),
    pytest.param(
        moved(0, 1000), moved(0.22, 1000), SOFTMAX, True, id="one row of a recogniser, all classes kept"
    ),
    pytest.param(moved(0, 1000), moved(0.251, 1000), SOFTMAX, False, id="more than a quarter in one"),
    pytest.param(tied(0, 0), tied(0.22, 0.01), SOFTMAX, True, id="beside a tie that falls otherwise"),
    pytest.param(tied(0, 0), tied(0.251, 0.01), SOFTMAX, False, id="more than a quarter there"),
    pytest.param(moved(0, 8), np.full((8, 3), 1 / 3), SOFTMAX, False, id="no decision any more"),
    pytest.param(SURE * 1e-3, 0.0 * SURE, SOFTMAX, False, id="zeros where all probabilities are small"),
    pytest.param(
        LOW + np.eye(1, 100) * 2e-3,
        LOW + np.eye(1, 100, 1) * 2e-3,
        SOFTMAX,
        False,
        id="another best class, far ahead for its size",
    ),
    pytest.param(SURE, np.where(SURE > 0.85, np.nan, SURE), SOFTMAX, False, id="NaN"),
    pytest.param(SMALL, SMALL + np.array([0, 0.02, 0.4]), LOGARITHMS, True, id="logarithms"),
    pytest.param(ALONE, ALONE + np.array([0.0099, 0]), SIGMOID, True, id="a value alone: a hundredth"),
    pytest.param(ALONE, ALONE + np.array([0.0101, 0]), SIGMOID, False, id="a value alone: more than that"),
    pytest.param(ALONE * 1e-6, ALONE * 1e-6 + 6e-8, SIGMOID, True, id="what FP32 does not resolve"),
    pytest.param(ALONE * 1e-6, ALONE * 1e-6 + 1.1e-6, SIGMOID, False, id="what it does"),
    pytest.param(SCORES, SCORES + 0.02, SIGMOID, False, id="scores of detections are no map"),
    pytest.param(blob(0.0), blob(0.5), SIGMOID, False, id="edges move by half a pixel"),
    pytest.param(blob(0.0), hole((24, 24), 0.5), SIGMOID, False, id="one wrong pixel inside"),
    pytest.param(blob(0.0), hole((2, 2), 0.5), SIGMOID, False, id="one wrong pixel outside"),
    pytest.param(blob(0.0), 0.97 * blob(0.0), SIGMOID, False, id="all a little less"),
    pytest.param(blob(0.0), np.zeros_like(blob(0.0)), SIGMOID, False, id="an empty map"),
]


@pytest.mark.parametrize(("expected", "actual", "kind", "passed"), LIMITS)
def test_what_passes_and_what_not(expected: Array, actual: Array, kind: Probabilities, passed: bool) -> None:
    one = judged(expected, actual, kind)
    assert one.relative_l2 > FP16 and (one.passed, one.excess <= 1.0) == (passed, passed)
    assert (one.probability is None) is bool(np.isnan(actual).any())


TEXTS = [
    pytest.param(
        ProbabilityError("", 0.8, 0.8, 0.01, 0.0, False),
        "mean distance of the rows 0.8, 0.01 allowed, at most 0.8, 0.1 allowed, "
        "the same best class in 0 % of the rows, and ties do not explain it",
        id="rows",
    ),
    pytest.param(
        ProbabilityError("", 0.01, None, 0.01, None, True, MapError(0.004, 0.02)),
        "largest difference 0.01, 0.01 allowed",
        id="values of a map that are right by themselves",
    ),
    pytest.param(
        ProbabilityError("", 0.02, None, 0.01, None, True, MapError(0.004, 0.02)),
        "0.004 of the map's area differs, 0.01 allowed; "
        "beyond the values around a pixel at most 0.02, 0.1 allowed",
        id="a map",
    ),
]


@pytest.mark.parametrize(("found", "text"), TEXTS)
def test_the_words_for_an_error(found: ProbabilityError, text: str) -> None:
    assert distances(found) == text


def test_what_needs_no_excuse_says_nothing() -> None:
    assert fair_text(judged(SURE, SURE)) == "" and judged(SURE, SURE).passed
    assert fair_text(judged(SURE, np.where(SURE > 0.85, np.nan, SURE))) == ""
    ((free, _),) = compare({"y": SURE}, {"y": SURE}, math.inf, kinds={"y": SOFTMAX})
    assert free.probability is None, "another metric decides"
    one = judged(np.array([[1.0], [1.0]]), np.array([[1.0], [0.999]])).probability
    assert one is not None and (one.top_1, one.mean, one.areas) == (None, None, None), "one class: no rows"
    ((raw, _),) = compare(
        {"y": SURE[:, :1]}, {"y": 2 * SURE[:, :1]}, FP16, kinds={"y": Probabilities("", -1, raw=True)}
    )
    assert raw.same_best is None and not scores_text(raw)


def test_a_measure_of_the_users_replaces_it() -> None:
    model = graph("g (float[2,3] x) => (float[2,3] y) { y = Softmax(x) }")
    assert Standard.of(model, TOLERANCES["fp16"]).kinds
    assert not Standard.of(model, TOLERANCES["fp16"], Tolerance(5e-3, "relative-l2", "--tolerance")).kinds
    assert not Standard.of(model, TOLERANCES["fp16"], fair=False).kinds


@pytest.mark.parametrize(("error", "passed"), [(0.1, True), (0.11, False)])
def test_a_relative_error_beyond_a_tenth_is_excused_by_nothing(error: float, passed: bool) -> None:
    one = replace(judged(SURE, SURE + np.array([-0.008, 0.004, 0.004])), relative_l2=error)
    assert (one.passed, one.excess <= 1.0) == (passed, passed)
    assert ("never passes by another measure" in fair_text(one)) is not passed


@pytest.mark.parametrize(
    "body", ["y = MatMul(x, x)", "a = MatMul(x, x) y = Add(a, c)", "a = MatMul(x, x) y = Identity(a)"]
)
def test_the_best_classes_of_what_may_be_scores_are_reported(body: str) -> None:
    """The graph does not tell scores from features: they are not judged by their best classes."""
    source = f"g (float[2,4,4] x) => (float[P,4,4] y) <float[4] c = {{1, 2, 3, 4}}> {{ {body} }}"
    kinds = probabilities(graph(source))
    assert kinds["y"].raw and "(MatMul) makes it" in kinds["y"].reason
    exact = np.eye(4, dtype=np.float32)[np.newaxis]
    other = exact * np.float32(1.1)
    ((close, _),) = compare({"y": exact}, {"y": exact}, 5e-3, kinds=kinds)
    assert close.passed and not scores_text(close)
    ((same, _),) = compare({"y": exact}, {"y": other}, 5e-3, kinds=kinds)
    assert not same.passed and same.probability is None
    assert "at the same place in 100 % of the rows" in scores_text(same)
    other[0, 0] = other[0, 1]
    ((moved, _),) = compare({"y": exact}, {"y": other}, 5e-3, kinds=kinds)
    assert moved.same_best == 0.75 and "in 75 % of the rows" in scores_text(moved)


@pytest.mark.parametrize(("text", "opset", "axis"), cases("metrics/classes.txt"))
def test_the_axis_of_the_classes(text: str, opset: str, axis: str) -> None:
    classes = None if axis == "None" else int(axis)
    form = "<int64[2] t = {6, 4}>" if "Reshape" in text else ""
    shape = "6,4" if form else "2,3,4"
    source = graph(f"g (float[2,3,4] x) => (float[{shape}] y) {form} {{ {text} }}", opset=int(opset))
    assert probabilities(source)["y"].classes == classes
    source.proto.graph.output[0].type.tensor_type.ClearField("shape")
    from_end = classes if "axis = " not in text or "axis = -" in text else None
    assert probabilities(source)["y"].classes == from_end, "of unknown rank"


@pytest.mark.parametrize(
    ("value", "kind", "nothing"),
    [
        pytest.param(0.0099, SIGMOID, True, id="below what a threshold would pass"),
        pytest.param(0.01, SIGMOID, False, id="as much"),
        pytest.param(0.0, SOFTMAX, False, id="rows of classes: one of them is always found"),
        pytest.param(-1.0, LOGARITHMS, False, id="logarithms are all below 0"),
        pytest.param(0.0, None, False, id="an output that is no probability"),
    ],
)
def test_a_sample_in_which_nothing_is_found(value: float, kind: Probabilities | None, nothing: bool) -> None:
    outputs = {"y": np.asarray([0.0, value]), "count": np.asarray([7])}
    assert finds_nothing(outputs, {"y": kind} if kind else {}) is nothing
    low = {"a": np.asarray([0.001]), "b": np.zeros(0)}
    assert finds_nothing(low, {"a": SIGMOID, "b": SIGMOID}), "no score is no finding"
    assert not finds_nothing({"n": np.asarray([0])}, {})


@pytest.mark.parametrize(("share", "decided"), [(0.1, True), (0.11, False)])
def test_two_classes_within_a_tenth_are_a_tie(share: float, decided: bool) -> None:
    """0.5 and 0.45 are; the others share the rest."""
    row = np.array([[0.5, 0.5 * (1.0 - share), 0.5 * share]])
    found = judged(row, row[:, [1, 0, 2]]).probability
    assert found is not None and (found.top_1, found.decided) == (0.0, decided)


def squares(*sides: int, shape: tuple[int, ...] = (1, 1, 32, 32), value: float = 1.0) -> list[Array]:
    """Empty maps with a square from pixel (8, 8) on."""
    found = []
    for side in sides:
        array = np.zeros(shape, np.float32)
        array[..., 8 : 8 + side, 8 : 8 + side] = value
        found.append(array)
    return found


@values
def test_a_map_has_two_sides_of_sixteen_pixels(shape: tuple[int, ...], is_map: bool) -> None:
    assert (map_error(np.zeros(shape), np.zeros(shape)) is not None) is is_map


@pytest.mark.parametrize(
    ("pair", "distance"),
    [
        pytest.param(squares(10, 10), 0.0, id="equal"),
        pytest.param(squares(9, 10), 0.19, id="an edge moved by a pixel"),
        pytest.param(squares(10, 9), 0.19, id="the other way"),
        pytest.param(squares(0, 10), 1.0, id="nothing was there"),
        pytest.param(squares(0, 0), 0.0, id="both empty"),
        pytest.param(squares(1, 2, value=0.125), 0.75, id="less than one pixel of area"),
    ],
)
def test_the_distance_is_the_share_of_the_area_that_differs(pair: list[Array], distance: float) -> None:
    found = map_error(*pair)
    assert found is not None and found.distance == pytest.approx(distance)


@values
def test_a_value_between_its_neighbours_is_an_edge(value: float, at: tuple[int, int], beyond: float) -> None:
    expected, actual = squares(10, 10)
    actual[0, 0, *at] = value
    found = map_error(expected, actual)
    assert found is not None and found.beyond == pytest.approx(beyond)
    assert found.excess(1.0) == pytest.approx(max(found.distance, beyond / 0.1)), "the worse figure"
