"""Detectors are compared as detections: right ones stay verified, wrong ones fail and say what they lost."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from graphs import with_weights
from tables import values

import rewriter
from rewriter.ir.model import Array, Model, save
from rewriter.jobs.fix.before import lowered
from rewriter.report.remarks import worded
from rewriter.runtime.metrics.detections import Detections, compared, layout_of

HEAD = """
    edge = Constant <value = float {640.0}> () third = Constant <value = float {0.3}> ()
    l = MatMul(b, x) place = Sigmoid(l) m = MatMul(size, x) s = Sigmoid(m) small = Mul(s, third)
    unit = Concat<axis = 1>(place, small) boxes = Mul(unit, edge)
    n = MatMul(c, x) o = Add(n, bias) p = Sigmoid(o)"""
PARTS = {"b": (1, 2, 16), "size": (1, 2, 16), "c": (1, 12, 16), "bias": (1, 12, 1)}
INPUTS = "float[1,16,300] x, float[1,2,16] b, float[1,2,16] size, float[1,12,16] c, float[1,12,1] bias"
FORMS = {
    "YOLO": ("float[1,16,300] y", "y = Concat<axis = 1>(boxes, p)"),
    "YOLO, turned": (
        "float[1,300,16] y",
        "z = Concat<axis = 1>(boxes, p) y = Transpose<perm = [0, 2, 1]>(z)",
    ),
    "boxes beside scores": (
        "float[1,300,4] boxes_out, float[1,300,12] scores",
        "boxes_out = Transpose<perm = [0, 2, 1]>(boxes) scores = Transpose<perm = [0, 2, 1]>(p)",
    ),
    "the best of them": (
        "float[1,50,6] y",
        """axis = Constant <value = int64[1] {1}> () first = Constant <value = int64[1] {0}> ()
        k = Constant <value = int64[1] {50}> () best = ReduceMax<axes = [1], keepdims = 0>(p)
        class = ArgMax<axis = 1, keepdims = 0>(p) flat = Squeeze(best, first) top, at = TopK(flat, k)
        t = Transpose<perm = [0, 2, 1]>(boxes) rows = Squeeze(t, first) chosen = Gather(rows, at)
        labels = Squeeze(class, first) own = Gather(labels, at) number = Cast<to = 1>(own)
        u = Unsqueeze(top, axis) v = Unsqueeze(number, axis) one = Concat<axis = 1>(chosen, u, v)
        y = Unsqueeze(one, first)""",
    ),
}


def weights(seed: int, objects: float) -> dict[str, Array]:
    drawn = np.random.default_rng(seed)
    values = {name: drawn.normal(size=shape) * 0.5 for name, shape in PARTS.items()}
    return {n: a.astype(np.float32) for n, a in (values | {"bias": values["bias"] - objects}).items()}


def detector(form: str, values: Mapping[str, Array]) -> Model:
    outputs, last = FORMS[form]
    return with_weights(f"g ({INPUTS}) => ({outputs}) {{ {HEAD} {last} }}", dict(values))


def samples(seed: int) -> list[dict[str, Array]]:
    drawn = np.random.default_rng(100 + seed)
    return [{"x": drawn.normal(size=(1, 16, 300)).astype(np.float32)} for _ in range(2)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(5))
def test_right_detectors_are_verified(form: str, seed: int, tmp_path: Path) -> None:
    """Half of them have a box in most rows, as random data gives; the others in one of a hundred."""
    original = detector(form, weights(seed, 5.0 if seed % 2 == 0 or "best" in form else 0.0))
    right = save(lowered(original, "fp16"), tmp_path / "right.onnx")
    result = rewriter.verify(original.whole(), right, inputs=samples(seed), build=False)
    (check,) = (check for check in result.checks if check.name == "emulation")
    assert result.passed, worded(check).summary
    assert check.detections is not None and check.detections.passed, str(check.detections)
    assert check.detections.boxes > 0
    if "best" not in form:  # a TopK of the result may choose another row
        assert check.detections.found == check.detections.boxes and not check.detections.more


WRONG: dict[str, Callable[[dict[str, Array]], dict[str, Array]]] = {
    "scores destroyed": lambda v: v | {"c": v["c"] * np.float32(1e-3)},
    "boxes shifted": lambda v: v | {"b": v["b"][:, ::-1].copy()},
    "classes swapped": lambda v: {n: a[:, ::-1].copy() if n in ("c", "bias") else a for n, a in v.items()},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_detectors_fail_and_say_what_they_lost(form: str, wrong: str, tmp_path: Path) -> None:
    values = weights(7, 3.0)
    other = save(detector(form, WRONG[wrong](values)), tmp_path / "wrong.onnx")
    result = rewriter.verify(detector(form, values).whole(), other, inputs=samples(7), build=False)
    (check,) = (check for check in result.checks if check.name in ("emulation", "tf32"))
    assert check.passed is False and check.detections is not None and not check.detections.passed
    assert f"detections: {check.detections.found} of {check.detections.boxes} boxes" in worded(check).summary


ROWS = np.array([[10, 10, 60, 60, 0.9, 1], [200, 50, 300, 90, 0.26, 2], [0, 0, 5, 5, 0.02, 0]], np.float32)


@values
def test_boxes_are_found_by_place_score_and_class(change: list[float], found: int, more: int) -> None:
    layout = layout_of([{"y": ROWS}])
    assert layout is not None
    result = compared(layout, {"y": ROWS}, {"y": (ROWS + change)[[1, 0, 2]].astype(np.float32)})
    assert result is not None and (result.boxes, result.found, result.more) == (2, found, more)


NONE = [
    pytest.param({"y": np.random.default_rng(0).normal(size=(1, 16, 64))}, id="hidden states"),
    pytest.param({"y": np.full((1, 10), 0.1)}, id="probabilities"),
    pytest.param({"q": np.random.default_rng(0).normal(size=(40, 4)), "p": np.full(40, 0.5)}, id="poses"),
    pytest.param({"boxes": ROWS[:, :4]}, id="boxes without scores"),
]


@pytest.mark.parametrize("outputs", NONE)
def test_what_holds_no_boxes_is_not_compared_as_detections(outputs: dict[str, Array]) -> None:
    assert layout_of([{name: array.astype(np.float32) for name, array in outputs.items()}]) is None


def test_a_right_model_may_lose_one_box_or_5_percent() -> None:
    assert Detections(3, 2).passed and not Detections(3, 1).passed
    assert Detections(100, 97, 2).passed and not Detections(100, 97, 3).passed


TABLE = """g (float[400,16] x, float[16,4] b, float[16,8] c) => (float[50,6] y)
    <int64[1] k = {50}, int64[1] last = {1}, float size = {640.0}, float factor = {FACTOR}> {
        m = MatMul(x, b) s = Sigmoid(m) boxes = Mul(s, size) n = MatMul(x, c) p = Sigmoid(n)
        best = ReduceMax<axes = [1], keepdims = 0>(p) label = ArgMax<axis = 1, keepdims = 0>(p)
        top, index = TopK<axis = 0>(best, k) kept = Gather(boxes, index) classes = Gather(label, index)
        floats = Cast<to = 1>(classes) t = Unsqueeze(top, last) u = Mul(t, factor) v = Unsqueeze(floats, last)
        y = Concat<axis = 1>(kept, u, v) }"""
"""The best 50 boxes of one image, [N, 6] without a batch: FP16 makes other ones of equal scores the first."""


def test_a_table_without_a_batch_is_compared_as_a_set(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weights = {"b": rng.normal(size=(16, 4)), "c": rng.normal(size=(16, 8)) / 4.0}
    weights = {name: array.astype(np.float32) for name, array in weights.items()}
    right, wrong = (
        save(with_weights(TABLE.replace("FACTOR", factor), weights), tmp_path / f"{factor}.onnx")
        for factor in ("1.0", "0.9")
    )
    inputs = {"x": rng.normal(size=(400, 16)).astype(np.float32)}
    result = rewriter.fix(right, inputs=inputs, build=False)
    assert result.verified and result.conclusion.lowered, result.ending
    assert result.checks[-1].outputs[0].note == "rows matched as sets, best 48 of 50"
    assert not rewriter.verify(right, wrong, inputs=inputs, build=False).passed


def test_two_heads_of_a_batch_of_four_are_no_boxes() -> None:
    rng = np.random.default_rng(0)
    features, classes = rng.random((4, 512)), rng.random((4, 512))
    assert layout_of([{"features": features, "classes": classes}]) is None
    named = layout_of([{"boxes": np.sort(features, axis=0), "classes": classes}])
    assert named is not None and named.boxes.turned


def test_outputs_whose_size_differs_between_samples() -> None:
    """A cache of four tokens beside shares is no box of the next sample's five; no rows are no boxes."""
    rng = np.random.default_rng(0)
    grown = [{"k": rng.random((1, 2, n, 16)), "p": rng.random((1, 2, 16, 8))} for n in (4, 5)]
    assert layout_of(grown) is None
    tables = [ROWS[None], ROWS[None, :0]]
    layout = layout_of([{"y": table} for table in tables])
    assert layout is not None
    assert sum(boxes.boxes for t in tables if (boxes := compared(layout, {"y": t}, {"y": t}))) == 2
