"""transpose-convs: Convs that become ConvTransposes, Convs that stay, equal results and weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from graphs import apply, graph, ops, random_feeds, run, with_constants
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from paths import MODELS

from rewriter.hazards.planning.planner import SEARCHED
from rewriter.ir.base import Context, Target
from rewriter.ir.model import Model, load
from rewriter.ir.plan import Decision, Plan, Precision
from rewriter.passes.transpose_convs import NEEDED_ANSWERS, TransposeConvs

TARGET = Target(answers=NEEDED_ANSWERS)
ANY = TransposeConvs(depth=1, work=0)


def _model(
    body: str, outputs: str = "float[N,5,P,Q] y", *, x: str = "float[N,3,6,8] x", opset: int = 17
) -> Model:
    """A graph with random FP32 weights: `w` and `b` of a Conv of 3x2 windows, and others by their shape."""
    shapes: dict[str, tuple[int, ...]] = {
        "w": (5, 3, 3, 2), "b": (5,), "one": (5, 3, 1, 1), "back": (3, 5, 3, 2), "grouped": (6, 1, 3, 2),
        "line": (5, 3, 3), "box": (5, 3, 3, 2, 2),
    }  # fmt: skip
    return with_constants(body, shapes, x, outputs, opset=opset)


def _transposed(before: Model, step: TransposeConvs = ANY, **context: Any) -> tuple[Model, Any]:
    return apply(step, before, Context(**{"target": TARGET, **context}))


def _holds(before: Model, after: Model) -> None:
    """Same results but for the order of sums, same signature, and nothing left to do."""
    assert after.signature == before.signature
    onnx.checker.check_model(after.whole(), full_check=True)
    feeds = random_feeds(before)
    for wanted, found in zip(run(before, feeds), run(after, feeds), strict=True):
        assert found.shape == wanted.shape
        difference = np.linalg.norm(found.astype(np.float64) - wanted)
        assert difference <= TransposeConvs.exactness.tolerance * np.linalg.norm(wanted)
    again, report = _transposed(after)
    assert again is after
    assert not report.changes


def test_a_window_that_an_engine_may_not_load_is_declined() -> None:
    source = with_constants(
        "{ y = Conv<pads = [1, 19, 1, 19]>(x, w) }",
        {"w": (8, 8, 3, 39)},
        "float[1,8,16,64] x",
        "float[1,8,16,64] y",
    )
    after, report = _transposed(source)
    assert after is source
    assert "a window of 3x39 may build and not load" in report.refusals[0].reason


def _plan(rule: str, precision: Precision = "fp16") -> Plan:
    return Plan(precision, decisions=(Decision("", "Conv", "0:y", rule, ""),))


PLANS = [
    pytest.param(Plan("fp16"), True, id="FP16"),
    pytest.param(_plan("partial-sums"), False, id="the rules keep it in FP32"),
    pytest.param(_plan("user"), False, id="the user keeps it in FP32"),
    pytest.param(_plan(SEARCHED), False, id="a search put it in FP32"),
    pytest.param(Plan("bf16"), False, id="BF16 was not measured"),
]


@pytest.mark.parametrize(("plan", "changed"), PLANS)
def test_by_plan(plan: Plan, changed: bool) -> None:
    before = _model("{ y = Conv(x, w) }")
    after, report = _transposed(before, plan=plan)
    assert (after is before) != changed
    assert not report.refusals


def test_a_conv_of_a_branch_that_the_plan_keeps_in_fp32_stays() -> None:
    before = graph(
        """
        g (float[1,1,4,4] x, bool c) => (float[1,1,3,3] y) {
            y = If (c) <
                then_branch = t () => (float[1,1,3,3] u) <float[1,1,2,2] w = {1, 2, 3, 4}> { u = Conv(x, w) },
                else_branch = e () => (float[1,1,3,3] v) { v = MaxPool<kernel_shape = [2, 2]>(x) }
            >
        }"""
    )
    plan = Plan("fp16", decisions=(Decision("", "Conv", "1:u", "overflow", ""),))
    assert _transposed(before, plan=plan)[0] is before


@st.composite
def convs(draw: st.DrawFn) -> tuple[Model, bool]:
    """A Conv of two axes at stride 1, and whether its padding is within the window's reach."""
    kernel = [draw(st.integers(1, 4)) for _ in range(2)]
    dilations = [draw(st.integers(1, 3)) for _ in range(2)]
    read, out, batch = draw(st.integers(1, 5)), draw(st.integers(1, 6)), draw(st.integers(1, 3))
    reach = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
    over = draw(st.sampled_from([0, 0, 0, 1]))
    attributes: dict[str, Any] = {"dilations": dilations}
    same = ["SAME_UPPER", "SAME_LOWER"] if dilations == [1, 1] else []  # else ONNX Runtime refuses the Conv
    auto = draw(st.sampled_from(["NOTSET", "NOTSET", "VALID", *same]))
    pads = [draw(st.integers(0, r + over)) for r in reach * 2]
    attributes |= {"pads": pads} if auto == "NOTSET" else {"auto_pad": auto}
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    constants = {"w": rng.standard_normal((out, read, *kernel)), "b": rng.standard_normal(out)}
    inputs = ["x", "w", "b"] if draw(st.booleans()) else ["x", "w"]
    held = [numpy_helper.from_array(v.astype(np.float32), n) for n, v in constants.items() if n in inputs]
    sizes = [r + draw(st.integers(1, 5)) for r in reach]
    rows: int | str = batch if draw(st.booleans()) else "N"
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows, read, *sizes])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    made = helper.make_graph([helper.make_node("Conv", inputs, ["y"], **attributes)], "g", [x], [y], held)
    opset = draw(st.sampled_from([11, 13, 17, 18, 21, 22]))
    source = helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    fits = auto != "NOTSET" or all(p <= r for p, r in zip(pads, reach * 2, strict=True))
    return load(onnx.shape_inference.infer_shapes(source)), fits


@given(convs())
def test_any_conv_of_stride_1_keeps_its_results(made: tuple[Model, bool]) -> None:
    before, fits = made
    after, report = _transposed(before)
    if not fits:
        assert after is before
        assert ["pads by more" in refusal.reason for refusal in report.refusals] == [True]
        return
    assert ops(after) == ["ConvTranspose"]
    _holds(before, after)


CASES = {"resnet": 10, "nafnet": 29, "mobilenet_v2": 34, "rtdetr": 58, "convnext": 0, "if_loop": 0}
"""Convs of the case models that become ConvTransposes, were the options' bounds none."""


@pytest.mark.parametrize("name", CASES)
def test_all_dense_convs_of_a_case_are_transposed(name: str) -> None:
    before = load(MODELS / f"{name}.onnx")
    after, report = _transposed(before)
    assert len(report.changes) == CASES[name]
    assert not report.refusals
    feeds = dict(np.load(MODELS / f"{name}.npz"))
    for wanted, found in zip(run(before, feeds), run(after, feeds), strict=True):
        error = np.linalg.norm(found.astype(np.float64) - wanted)
        assert error <= TransposeConvs.exactness.tolerance * np.linalg.norm(wanted)
