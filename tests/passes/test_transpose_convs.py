"""transpose-convs: Convs that become ConvTransposes, Convs that stay, equal results and weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from graphs import apply, graph, ops, random_feeds, run, with_constants
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from paths import MODELS

from rewriter.base import Context, Kept, Target
from rewriter.graph import attribute
from rewriter.model import Model, load
from rewriter.passes.transpose_convs import NEEDED_ANSWERS, TransposeConvs
from rewriter.plan import Decision, Plan, Precision
from rewriter.planning.planner import SEARCHED

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


TRANSPOSED = [
    pytest.param("Conv(x, w, b)", [2, 1, 2, 1], id="no padding"),
    pytest.param("Conv(x, w)", [2, 1, 2, 1], id="no bias"),
    pytest.param("Conv<pads = [1, 0, 1, 1]>(x, w, b)", [1, 1, 1, 0], id="other at the end"),
    pytest.param("Conv<pads = [2, 1, 0, 0]>(x, w, b)", [0, 0, 2, 1], id="as much as the window reaches"),
    pytest.param("Conv<dilations = [2, 3]>(x, w, b)", [4, 3, 4, 3], id="dilated"),
    pytest.param("Conv<dilations = [2, 3], pads = [1, 0, 3, 2]>(x, w, b)", [3, 3, 1, 1], id="both"),
    pytest.param("Conv(x, one, b)", [0, 0, 0, 0], id="windows of one element"),
    pytest.param("Conv<strides = [1, 1], group = 1>(x, w, b)", [2, 1, 2, 1], id="defaults"),
    pytest.param('Conv<auto_pad = "VALID">(x, w, b)', [2, 1, 2, 1], id="auto_pad VALID"),
    pytest.param('Conv<auto_pad = "SAME_UPPER">(x, w, b)', [1, 1, 1, 0], id="auto_pad SAME_UPPER"),
    pytest.param('Conv<auto_pad = "SAME_LOWER">(x, w, b)', [1, 0, 1, 1], id="auto_pad SAME_LOWER"),
]  # fmt: skip


@pytest.mark.parametrize("opset", [7, 11, 13, 17, 22])
@pytest.mark.parametrize(("conv", "pads"), TRANSPOSED)
def test_transposed(conv: str, pads: list[int], opset: int) -> None:
    before = _model(f"{{ y = {conv} }}", opset=opset)
    after, report = _transposed(before)
    assert ops(after) == ["ConvTranspose"]
    assert attribute(after.proto.graph.node[0], "pads") == pads
    assert (len(report.changes), report.refusals) == (1, ())
    _holds(before, after)


def test_same_padding_follows_the_dilation() -> None:
    """ONNX Runtime refuses such a Conv; shape inference, which the driver runs, does not."""
    after, _ = _transposed(_model('{ y = Conv<auto_pad = "SAME_UPPER", dilations = [2, 3]>(x, w, b) }'))
    (node,) = after.proto.graph.node
    assert (attribute(node, "pads"), attribute(node, "dilations")) == ([2, 2, 2, 1], [2, 3])


def test_weights_keep_every_bit_and_names_stay() -> None:
    before = _model("{ c = Conv(x, w, b) y = Relu(c) }")
    before.proto.graph.node[0].name = "/stem/Conv"
    after, report = _transposed(before)
    node = after.proto.graph.node[0]
    assert (node.name, list(node.output), node.input[2]) == ("/stem/Conv", ["c"], "b")
    given, made = (
        {t.name: m.array(t) for t in m.proto.graph.initializer} for m in (before, after)
    )  # fmt: skip
    assert made.keys() == {"w/transposed", "b"}
    np.testing.assert_array_equal(made["w/transposed"], given["w"][:, :, ::-1, ::-1].transpose(1, 0, 2, 3))
    assert report.changes[0].what == "became a ConvTranspose, which sums in FP32"


def test_convs_that_share_a_weight_share_the_turned_one() -> None:
    before = _model(
        "{ y = Conv(x, w, b) r = Relu(x) z = Conv(r, w, b) t = Transpose(w) }",
        "float[N,5,4,7] y, float[N,5,4,7] z, float[2,3,3,5] t",
    )
    after, report = _transposed(before)
    assert len(report.changes) == 2
    weights = [node.input[1] for node in after.proto.graph.node if node.op_type == "ConvTranspose"]
    assert weights == ["w/transposed"] * 2
    assert "w" in {t.name for t in after.proto.graph.initializer}, "other consumers read it"
    _holds(before, after)


SILENT = [
    pytest.param("{ y = Conv<strides = [2, 1]>(x, w, b) }", "float[N,3,6,8] x", id="a stride"),
    pytest.param("{ y = Conv<group = 6>(x, grouped) }", "float[N,6,6,8] x", id="groups"),
    pytest.param("{ n = Neg(w) y = Conv(x, n) }", "float[N,3,6,8] x", id="a computed weight"),
    pytest.param("{ y = Conv(x, line) }", "float[N,3,6] x", id="one axis: not measured"),
    pytest.param("{ y = Conv(x, box) }", "float[N,3,6,8,4] x", id="three axes: not measured"),
    pytest.param("{ y = ConvTranspose(x, back) }", "float[N,3,6,8] x", id="a ConvTranspose"),
]


@pytest.mark.parametrize(("body", "x"), SILENT)
def test_skipped(body: str, x: str) -> None:
    before = _model(body, x=x)
    after, report = _transposed(before)
    assert after is before
    assert not report.refusals


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


@pytest.mark.parametrize(
    "pads", [pytest.param([3, 0, 0, 0], id="at the begin"), pytest.param([0, 0, 0, 2], id="at the end")]
)
def test_padding_beyond_the_window_is_declined(pads: list[int]) -> None:
    before = _model(f"{{ y = Conv<pads = {pads}>(x, w) }}")
    after, report = _transposed(before)
    assert after is before
    assert ["pads by more than its window reaches" in refusal.reason for refusal in report.refusals] == [True]


# 3 x 3 x 2 = 18 products for each of 5 x 4 x 7 = 140 elements: 5040 FLOP.
BOUNDS = [
    pytest.param(TransposeConvs(depth=18, work=0), "[N,3,6,8]", True, id="as deep"),
    pytest.param(TransposeConvs(depth=19, work=0), "[N,3,6,8]", False, id="not as deep"),
    pytest.param(TransposeConvs(depth=1, work=1), "[N,3,6,8]", False, id="5 kFLOP: the batch counts as 1"),
    pytest.param(TransposeConvs(depth=1, work=1), "[198,3,6,8]", False, id="less work"),
    pytest.param(TransposeConvs(depth=1, work=1), "[199,3,6,8]", True, id="as much work: 1.003 MFLOP"),
    pytest.param(TransposeConvs(depth=1, work=1), "[2,3,H,W]", True, id="64 x 64: 1.5 MFLOP"),
    pytest.param(TransposeConvs(depth=1, work=1), "[N,3,H,W]", False, id="64 x 64: 0.7 MFLOP"),
    pytest.param(TransposeConvs(), "[N,3,512,512]", False, id="the defaults: 18 products"),
]


@pytest.mark.parametrize(("step", "shape", "changed"), BOUNDS)
def test_bounds(step: TransposeConvs, shape: str, changed: bool) -> None:
    _, report = _transposed(_model("{ y = Conv(x, w) }", x=f"float{shape} x"), step)
    assert (len(report.changes), len(report.refusals)) == (int(changed), 0)


TARGETS = [
    pytest.param(TARGET, True, id="it gains"),
    pytest.param(Target(), False, id="nothing is known"),
    pytest.param(Target(answers={"conv-accumulation": "fp16"}), False, id="ConvTranspose not probed"),
    pytest.param(Target(answers={"conv-transpose-accumulation": "fp32"}), False, id="Conv not probed"),
    pytest.param(Target(answers={**NEEDED_ANSWERS, "conv-accumulation": "fp32"}), False, id="FP32 Conv"),
    pytest.param(Target(answers={**NEEDED_ANSWERS, "conv-transpose-accumulation": "fp16"}), False, id="FP16"),
]  # fmt: skip


@pytest.mark.parametrize(("target", "changed"), TARGETS)
def test_only_where_the_target_gains(target: Target, changed: bool) -> None:
    before = _model("{ y = Conv(x, w) }")
    after, report = _transposed(before, target=target)
    assert (after is before) != changed
    assert not report.refusals


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


KEPT = [
    pytest.param(Kept(("*/stem/*",)), id="by pattern"),
    pytest.param(Kept(("y",)), id="by its output"),
    pytest.param(Kept(ops=("Conv",)), id="by its operator"),
]


@pytest.mark.parametrize("kept", KEPT)
def test_a_conv_that_the_user_keeps_in_fp32_stays(kept: Kept) -> None:
    before = _model("{ y = Conv(x, w) }")
    before.proto.graph.node[0].name = "/stem/Conv"
    after, report = _transposed(before, kept=kept)
    assert after is before
    assert ["kept in FP32 by" in refusal.reason for refusal in report.refusals] == [True]


def test_quantised_weights_stay_as_they_are() -> None:
    before = graph(
        """
        g (float[1,1,2,2] x) => (float[1,1,1,1] y) <int8[1,1,2,2] q = {1, 2, 3, 4}, float s = {0.5}> {
            w = DequantizeLinear(q, s)
            y = Conv(x, w)
        }"""
    )
    after, report = _transposed(before)
    assert after is before
    assert ["quantised" in refusal.reason for refusal in report.refusals] == [True]


def test_doubles_are_declined() -> None:
    before = graph(
        "g (double[1,1,2,2] x) => (double[1,1,1,1] y) <double[1,1,2,2] w = {1, 2, 3, 4}> { y = Conv(x, w) }"
    )
    after, report = _transposed(before)
    assert after is before
    assert ["of a type" in refusal.reason for refusal in report.refusals] == [True]


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


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_a_model_in_lower_precision_keeps_its_type(dtype: int) -> None:
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    weight = numpy_helper.from_array(np.ones((2, 3, 2, 2)).astype(kind), "w")
    ports = [
        helper.make_tensor_value_info(n, dtype, s) for n, s in (("x", [1, 3, 4, 4]), ("y", [1, 2, 3, 3]))
    ]
    made = helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["y"])], "g", ports[:1], ports[1:], [weight]
    )
    before = load(helper.make_model(made, opset_imports=[helper.make_opsetid("", 22)], ir_version=10))
    after, _ = _transposed(before)
    assert ops(after) == ["ConvTranspose"]
    assert {t.name: t.data_type for t in after.proto.graph.initializer} == {"w/transposed": dtype}


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


@settings(max_examples=200, deadline=None)
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
