"""mixed-precision: its plan, its events, and every case model."""

from dataclasses import replace

import graphs
import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, numpy_helper
from tables import values

import rewriter
from rewriter.base.errors import PassError
from rewriter.hazards.analysis import PrecisionRequest
from rewriter.hazards.planning.planner import make_plan
from rewriter.ir.model import Array, Model
from rewriter.ir.plan import Decision, Plan
from rewriter.passes.algorithms.rounding import unbiased
from rewriter.passes.base import Change, Context
from rewriter.passes.mixed_precision import MixedPrecision
from rewriter.passes.mixed_precision import lowered as plainly_lowered
from rewriter.pipeline.driver import Driver
from rewriter.runtime.emulation import emulation, reference
from rewriter.runtime.metrics.metrics import METRICS
from rewriter.runtime.ranges import measure
from rewriter.verification.expected import run_all

TEXT = "g (float[2,3] x, float[3,4] w) => (float[2,4] y) { m = MatMul(x, w) e = Exp(m) y = Relu(e) }"


def plan_of(
    source: Model, wanted: PrecisionRequest | None = None, feeds: dict[str, Array] | None = None
) -> Plan:
    ranges = measure(reference(source), [feeds or graphs.random_feeds(source)])
    return make_plan(source, ranges, wanted or PrecisionRequest())


def lowered(source: Model, plan: Plan) -> Model:
    """Under the driver's contract, twice: the second time nothing changes."""
    context = Context(plan=plan, opset=source.opset)
    result, _ = graphs.apply(MixedPrecision(), source, context)
    again, (second,) = Driver().run(result, [MixedPrecision()], context)
    assert again.same_as(result)
    assert not second.changes
    return result


def test_bits_are_read_in_the_type_that_they_have() -> None:
    """BitCast of FP16 would give other bits, and another number of them."""
    text = """
        g (float[2,3] x, float[3,4] w) => (int32[2,4] bits, float[2,4] y) {
            m = MatMul(x, w) s = Sigmoid(m) bits = BitCast<to = 6>(s) back = BitCast<to = 1>(bits)
            y = Relu(back) }"""
    source = graphs.graph(text, opset=26, ir=10)
    fixed = lowered(source, plan_of(source))
    known = fixed.facts(strict=True).main
    types = {n.op_type: known[n.output[0]].dtype for n in fixed.proto.graph.node}
    assert types["MatMul"] == TensorProto.FLOAT16
    first, second = (n for n in fixed.proto.graph.node if n.op_type == "BitCast")
    assert known[first.input[0]].dtype == known[second.output[0]].dtype == TensorProto.FLOAT


def test_the_change_counts_nodes() -> None:
    source = graphs.graph(TEXT)
    plan = plan_of(source, PrecisionRequest(keep_ops=("Exp",)))
    _, report = graphs.apply(MixedPrecision(), source, Context(plan=plan))
    assert report.changes == (Change("model", "1 node in FP16, 2 in FP32"),)


@values
def test_types_of_inputs_and_outputs(io: str, precision: str, expected: list[int]) -> None:
    source = graphs.graph(TEXT, opset=22, ir=10)
    wanted = PrecisionRequest("fp16" if precision == "fp16" else "bf16")
    plan = replace(plan_of(source, wanted), io=io)
    result = lowered(source, plan)
    ports = (*result.signature.inputs, *result.signature.outputs)
    assert [p.dtype for p in ports] == expected
    inner = {result.facts().main[name].dtype for name in ("m", "e")}
    assert inner == {TensorProto.FLOAT16 if precision == "fp16" else TensorProto.BFLOAT16}


def test_a_constant_that_does_not_fit_names_tensor_and_way_out() -> None:
    source = graphs.graph("g (float[2] x) => (float[2] y) <float bound = {1e5}> { y = Min(x, bound) }")
    with pytest.raises(PassError, match=r"(?s)bound: .*1e\+05.*FP16.*`keep-fp32`"):
        graphs.apply(MixedPrecision(), source)
    assert plan_of(source).decisions[0].rule == "weights"
    assert lowered(source, plan_of(source)).same_as(source)


GROWN = """
    g (float[4,64] x, float[64,64] w) => (float[4,64] y) <float c = {1e-5}> {
        e = Exp(x) m = MatMul(e, w) s = Mul(m, c) y = Tanh(s) }"""


def test_a_bf16_island_holds_values_beyond_fp16() -> None:
    source = graphs.graph(GROWN)
    feeds = {"x": np.full((4, 64), 3, np.float32), "w": graphs.random_feeds(source, scale=1000.0)["w"]}
    kept = tuple(Decision("", op, f"0:{t}", "overflow", "", None, None, "bf16") for t, op in ISLAND)
    result = lowered(source, Plan("fp16", decisions=kept))
    types = {name: result.facts().main[name].dtype for name in ("e", "m", "s")}
    assert types == {"e": TensorProto.FLOAT16, "m": TensorProto.BFLOAT16, "s": TensorProto.BFLOAT16}
    (expected,) = run_all(source, [feeds])
    for plan, finite_and_near in ((Plan("fp16"), False), (Plan("fp16", decisions=kept), True)):
        emulated = emulation(lowered(source, plan), "fp16")
        error = METRICS["relative-l2"].worst(expected, run_all(emulated, [feeds])[0])
        assert (error < 1e-2) == finite_and_near


ISLAND = (("m", "MatMul"), ("s", "Mul"))


def test_tensorrt_builds_a_bf16_island() -> None:
    pytest.importorskip("tensorrt_rtx")
    source = graphs.graph(GROWN)
    kept = tuple(Decision("", op, f"0:{t}", "overflow", "", None, None, "bf16") for t, op in ISLAND)
    feeds = {"x": np.full((4, 64), 3, np.float32), "w": graphs.random_feeds(source, scale=1000.0)["w"]}
    result = rewriter.fix(source.whole(), plan=Plan("fp16", decisions=kept), inputs=feeds)
    assert {c.name: c.passed for c in result.checks}["build"], result.verdict


ROUNDED = """
    g (float[2,16,9,9] x) => (float[2,8,9,9] c, float[2,12] p, float[2,5] q, float[2,12] r, float[2,12] s,
        float[2,16,9,5] t, float[2] u) {
        c = Conv<group = 2, pads = [1, 1, 1, 1]>(x, cw, cb) f = Flatten(x) m = MatMul(f, mw)
        p = Add(m, mb) q = Gemm<transB = 1>(f, gw, gb) r = MatMul(f, shared) s = MatMul(f, shared)
        t = MatMul(x, batch) u = MatMul(f, vector) }"""
SHAPES = {"cw": (8, 8, 3, 3), "cb": (8,), "mw": (1296, 12), "mb": (12,), "gw": (5, 1296), "gb": (5,)}
SHARED = {"shared": (1296, 12), "batch": (2, 16, 9, 5), "vector": (1296,)}


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["fp16", "bf16"])
def test_the_constant_vanishes_and_no_weight_moves_by_more_than_one_unit(dtype: type[np.generic]) -> None:
    rng = np.random.default_rng(0)
    given = rng.standard_normal((40, 300)).astype(np.float32)
    given[:, ::7] = 0.0
    means, lost, nearest = rng.random((1, 300)), rng.standard_normal(40) * 1e-3, given.astype(dtype)
    stored = unbiased(given, nearest, means, 1.0, lost)

    def constant(rounded: Array) -> float:
        return float(np.abs(lost + ((given - rounded.astype(np.float64)) * means).sum(axis=1)).mean())

    wide = stored.astype(np.float64)
    assert constant(stored) < constant(nearest) / 8
    assert (np.abs(given - wide) <= 2 * np.abs(given - nearest.astype(np.float64)).max()).all()
    assert (stored[given == 0] == 0).all()
    assert np.square(given - wide).sum() < 1.05 * np.square(given - nearest.astype(np.float64)).sum()
    exact = nearest.astype(np.float32)
    assert (unbiased(exact, nearest, means, 1.0, np.zeros(1)) == nearest).all()


def test_outputs_keep_their_mean_over_the_samples() -> None:
    source, rng = graphs.weighted(ROUNDED, **SHAPES, **SHARED), np.random.default_rng(1)
    feeds = [{"x": rng.random((2, 16, 9, 9), np.float32)} for _ in range(4)]
    exact = run_all(source, feeds)
    bias: dict[str, dict[str, float]] = {}
    for rounding in ("nearest", "unbiased"):
        passes = f"mixed-precision{{rounding={rounding}}}"
        fixed = rewriter.fix(source, inputs=feeds, passes=passes, verify=False).model
        outputs = run_all(reference(fixed), feeds)  # the weights are rounded, and nothing else
        errors = {
            name: np.stack([o[name] - e[name] for o, e in zip(outputs, exact, strict=True)])
            for name in exact[0]
        }
        axes = {name: tuple(a for a in range(e.ndim) if a != 2) for name, e in errors.items()}
        bias[rounding] = {name: float(np.abs(e.mean(axis=axes[name])).mean()) for name, e in errors.items()}
    nearest, kept = bias["nearest"], bias["unbiased"]
    assert kept["c"] < nearest["c"] / 2  # zeros around the border are in no mean
    assert kept["p"] < nearest["p"] / 4 and kept["q"] < nearest["q"] / 4
    # two nodes read the weight; it is no matrix
    assert all(kept[name] == nearest[name] for name in ("r", "s", "t", "u"))


@values
def test_the_lower_bound_of_a_divisor_stays_above_zero(body: str, raised: bool) -> None:
    source = graphs.graph(
        f"""g (float[2,4] x) => (float[N,M] y) <float e = {{1e-12}}, int64[2] d = {{2, 4}}> {{
            m = ReduceL2<axes = [1]>(x) {body} }}"""
    )
    low = plainly_lowered(source, Plan("fp16"))
    (bound,) = (numpy_helper.to_array(t) for t in low.proto.graph.initializer if t.name == "e")
    assert bound == np.float16(2.0**-14 if raised else 0.0)


def test_a_row_of_zeros_has_no_direction_in_fp16() -> None:
    source = graphs.graph(
        """g (float[2,4] x) => (float[2,4] y) <float e = {1e-12}> {
            m = ReduceL2<axes = [1]>(x) c = Clip(m, e) y = Div(x, c) }"""
    )
    x = np.array([[0, 0, 0, 0], [3, 0, 4, 0]], np.float32)
    (result,) = run_all(plainly_lowered(source, Plan("fp16")), [{"x": x}])
    assert result["y"] == pytest.approx(np.array([[0, 0, 0, 0], [0.6, 0, 0.8, 0]]), abs=1e-3)


@pytest.mark.parametrize(("op", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
def test_tensorrt_builds_a_recurrent_layer_in_fp32_behind_one_in_fp16(op: str, gates: int) -> None:
    pytest.importorskip("tensorrt_rtx")
    text = f"""
        g (float[5,2,8] x) => (float[5,1,2,8] y) <int64[1] one = {{1}}> {{
            first = {op}<hidden_size = 8>(x, w, r) s = Squeeze(first, one)
            y = {op}<hidden_size = 8>(s, w2, r2) }}"""
    shape = (1, gates * 8, 8)
    source = graphs.weighted(text, w=shape, r=shape, w2=shape, r2=shape)
    kept = Plan("fp16", decisions=(Decision("", op, "0:y", "overflow", ""),))
    result = rewriter.fix(source.whole(), plan=kept)
    assert all(check.passed for check in result.checks), result.verdict
    assert [n.op_type for n in result.proto.graph.node if n.op_type in (op, "Add")] == [op, "Add", op]
