"""What was wrong with a model, in numbers: from the plan, the passes and the ranges."""

from typing import Any

import numpy as np
import onnx
import pytest
from graphs import graph
from onnx import helper, numpy_helper
from onnx_text import with_header
from tables import values

import rewriter
from rewriter.ir.model import Model, load
from rewriter.ir.plan import Decision, Evidence, NormHazard, Plan, Range
from rewriter.jobs.fix.before import check_before
from rewriter.jobs.fix.repair_facts import RepairFacts
from rewriter.passes.base import Clamped
from rewriter.pipeline.driver import PassResult
from rewriter.report.causes import causes
from rewriter.runtime.metrics.outputs import OutputComparison
from rewriter.verification.expected import expected_outputs


def outputs_before(*arguments: Any) -> tuple[OutputComparison, ...]:
    check = check_before(*arguments)
    assert check is not None
    return check.outputs


def decision(
    index: int, rule: str, reason: str, high: float, *, finite: bool = True, norm: NormHazard | None = None
) -> Decision:
    measured = Range(0.0, high, 1.0, finite)
    node = f"/n.{index}"
    return Decision(node, "Mul", f"0:t{index}", rule, reason, f"t{index}", measured, norm=norm)


def texts(*decisions: Decision, passes: tuple[PassResult, ...] = (), low: str = "fp16") -> list[str]:
    plan = Plan(low, decisions=decisions, float_nodes=99)  # type: ignore[arg-type]
    return [str(cause) for cause in causes(plan, passes, RepairFacts())]


def test_the_squares_of_norms_are_counted_by_norm() -> None:
    norms = [
        decision(i, "unfused-norm", "", 1e5 + 1e6 * i, norm=NormHazard("layer-norm", f"y{i // 9}", "squares"))
        for i in range(27)
    ]
    expected = (
        "squares inside 3 decomposed LayerNorms reach 2.6e7, FP16 ends at 65504: 3 norms (27 nodes in FP32)"
    )
    assert texts(*norms) == [expected]


def test_one_norm_and_one_node_are_singular() -> None:
    norm = NormHazard("rms-norm", "/layer-norm under the root/y", "squares")
    (text,) = texts(decision(0, "unfused-norm", "part of the layer-norm", 4e4, norm=norm))
    assert text.startswith(
        "squares inside 1 decomposed RMSNorm reach 40000, FP16 ends at 65504, a factor of 1.6"
    )
    assert text.endswith("1 norm (1 node in FP32)")


@values
def test_norms_without_wide_squares(evidence: Evidence, what: str) -> None:
    norm = NormHazard("l2-normalize", "y", evidence)
    assert texts(decision(0, "unfused-norm", "", 1.0, norm=norm)) == [f"{what}: 1 norm (1 node in FP32)"]


def test_overflows_come_first_and_say_how_large() -> None:
    found = texts(
        decision(0, "epsilon", "1e-12 is below FP16's normal range", 1.0),
        decision(1, "overflow", "t1 exceeds 32752", 1e5),
        decision(2, "overflow", "t2 exceeds 32752", 3e9),
    )
    assert found[0] == "2 tensors reach up to 3e9, FP16 ends at 65504: 2 nodes in FP32"
    assert found[1].startswith("epsilon that FP16 loses (1e-12 is below FP16's normal range")


def test_what_is_infinite_already_is_said_to_be() -> None:
    (text,) = texts(decision(0, "overflow", "t0 is not finite", 1e5, finite=False))
    assert text == "t0 has NaN or infinite values in FP32 already: 1 node in FP32"


def test_what_costs_nothing_is_no_cause() -> None:
    assert texts(decision(0, "epilogue", "at no cost", 1.0), decision(1, "user", "kept", 1.0)) == []


def test_repairs_that_leave_no_trace_in_the_plan() -> None:
    clamped = PassResult("clamp-constants", (Clamped("/Where", "", -3.4028e38, -16384.0),), (), 0.0)
    expected = "1 constant such as -3.403e+38 is infinite in FP16: clamped to -1.638e+04"
    assert texts(passes=(clamped,)) == [expected]
    fused = [
        (f"/ln.{i}", "LayerNormalization", Range(-top, top, 1.0, True))
        for i, top in enumerate((10.0, 300.0, 12000.0))
    ]
    (cause,) = causes(Plan("fp16", float_nodes=3), (), RepairFacts(fused))
    assert cause.what == "squares inside 2 decomposed norms reach 1.4e8 (inputs 12000), FP16 ends at 65504"
    assert cause.nodes == ("/ln.1", "/ln.2")
    scaled = causes(
        Plan("fp16", float_nodes=3), (), RepairFacts(unscaled={(0, "m"): Range(-1.0, 1e6, 1.0, True)})
    )
    assert str(scaled[0]) == "m reaches 1e6, FP16 ends at 65504: 1 tensor rescaled by powers of two"


NORMALIZED = """
    <ir_version: 8, opset_import: ["" : 17]>
    g (float[1,2,4,4] x) => (float[1,2,4,4] y)
    <float[2,2,1,1] w = {9000.0, 1.0, 2.0, 7000.0}, float[2] s = {1.0, 2.0}, float[2] b = {0.1, 0.2},
     float[2] m = {3.0, 4.0}, float[2] v = {VARIANCE, 2.0}> {
        c = Conv(x, w) y = BatchNormalization(c, s, b, m, v)
    }"""


@pytest.mark.parametrize(("variance", "texts"), [("9.8e7", 1), ("9.8", 0)], ids=["beyond FP16", "in FP16"])
def test_statistics_that_folding_hides_are_a_cause(variance: str, texts: int) -> None:
    source = onnx.parser.parse_model(NORMALIZED.replace("VARIANCE", variance))
    found = rewriter.fix(source, verify=False).causes
    statistics = [str(cause) for cause in found if "statistics" in cause.what]
    assert len(statistics) == texts
    assert all("up to 9.8e+07" in text and text.endswith("weights in FP32") for text in statistics)


SCALED = """
    g (float[4,16] x) => (float[4,16] y) {
        w = Constant<value_float = 30000.0>() down = Constant<value_float = 0.0000333>()
        a = Mul(x, w) b = Relu(a) c = Mul(b, down) y = Sigmoid(c) }"""


def test_a_rescaled_overflow_is_a_cause_and_never_free() -> None:
    source = graph(SCALED)
    samples = {"x": np.float32(np.random.default_rng(0).standard_normal((4, 16)) * 20)}
    result = rewriter.fix(source.proto, inputs=samples, build=False)
    (cause,) = [cause for cause in result.causes if cause.kind == "overflow"]
    assert cause.reach is not None and cause.reach > 65504 and cause.limit == 65504
    assert result.plan is not None
    free = [d for d in result.plan.decisions if d.rule in ("epilogue", "norm", "softmax")]
    assert not {d.tensor for d in free} & {"a", "b"}


@values
def test_the_error_before_is_that_of_plain_fp16(body: str, finite: bool) -> None:
    source: Model = graph(f"g (float[2] x) => (float[2] y) {{ {body} }}")
    samples = [{"x": np.array([300.0, 2.0], np.float32)}]
    before, *_ = outputs_before(source, expected_outputs(source, samples), samples, "fp16", "fp32")
    assert before.finite == finite


@values
def test_large_constants_beyond_fp16_become_infinite_wherever_they_stand(body: str) -> None:
    """RT-DETRv2 and D-FINE are exported with a Constant of anchors, 3e38 where there is none."""
    values = numpy_helper.from_array(np.full(512, 3e38, np.float32), "huge")
    text = f"g (float[512] x, bool c) => (float[512] y) {{ n = Not(c) {body} }}"
    source = onnx.parser.parse_model(with_header(text))
    (last,) = (node for node in source.graph.node if node.op_type in ("Add", "If"))
    if source.graph.node[1].op_type == "Constant":
        source.graph.node[1].attribute[0].CopyFrom(helper.make_attribute("value", values))
    else:
        place = last.attribute[0].g if last.op_type == "If" else source.graph
        place.initializer.append(values)
    model = load(source)
    samples = [{"x": np.ones(512, np.float32), "c": np.array(True)}]
    (before,) = outputs_before(model, expected_outputs(model, samples), samples, "fp16", "fp32")
    assert not before.finite


def test_the_error_before_of_an_old_opset_has_fp16_sums_too() -> None:
    text = """<ir_version: 8, opset_import: ["" : 11]> g (float[64,2048] x) => (float[64,64] y)
        <float[2048,64] w, float[64,64] v> { h = MatMul(x, w) r = Relu(h) y = MatMul(r, v) }"""
    proto, draw = onnx.parser.parse_model(text), np.random.default_rng(0)
    for name, sizes in (("w", (2048, 64)), ("v", (64, 64))):
        weight = draw.standard_normal(sizes) / np.sqrt(sizes[0])
        proto.graph.initializer.append(numpy_helper.from_array(weight.astype(np.float32), name))
    del proto.graph.value_info[:]
    source, samples = load(proto), [{"x": draw.standard_normal((64, 2048)).astype(np.float32)}]
    expected = expected_outputs(source, samples)
    (exact,) = outputs_before(source, expected, samples, "fp16", "fp32")
    (rounded,) = outputs_before(source, expected, samples, "fp16", "fp16")
    assert rounded.relative_l2 > 1.5 * exact.relative_l2


def test_the_headroom_is_the_measured_one() -> None:
    measured = Range(0.0, 1010.0, 1.0, True, headroom=128.0)
    one = Decision("/n", "Mul", "0:t", "overflow", "", "t", measured)
    (text,) = texts(one)
    assert text.startswith(
        "t reaches 1010, FP16 ends at 65504, a factor of 65 away; 128 is kept free, as the samples"
    )
    assert "a factor of 1.3 away; 2 is kept free: " in texts(decision(0, "overflow", "", 5e4))[0]
