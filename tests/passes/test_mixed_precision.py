"""mixed-precision: its plan, its events, and every case model."""

from dataclasses import replace

import graphs
import numpy as np
import pytest
from onnx import TensorProto
from tables import values

import rewriter
from rewriter.base.errors import PassError
from rewriter.hazards.analysis import PrecisionRequest
from rewriter.hazards.planning.planner import make_plan
from rewriter.ir.model import Array, Model
from rewriter.ir.plan import Decision, Plan
from rewriter.passes.base import Change, Context
from rewriter.passes.mixed_precision import MixedPrecision
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


def test_a_constant_that_does_not_fit_names_tensor_and_way_out() -> None:
    source = graphs.graph("g (float[2] x) => (float[2] y) <float bound = {1e5}> { y = Min(x, bound) }")
    with pytest.raises(PassError, match=r"(?s)bound: .*1e\+05.*FP16.*`keep-fp32`"):
        graphs.apply(MixedPrecision(), source)
    assert plan_of(source).decisions[0].rule == "weights"
    assert lowered(source, plan_of(source)).same_as(source)


def test_bf16() -> None:
    source = graphs.graph(TEXT, opset=22, ir=10)
    result = lowered(source, plan_of(source, PrecisionRequest("bf16")))
    types = {result.facts().main[name].dtype for name in ("m", "e")}
    assert types == {TensorProto.BFLOAT16}


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
    assert result.verdict is not None
    assert {c.name: c.passed for c in result.verdict.checks}["build"], result.verdict
