"""float64, which TensorRT computes as float32: every check sees what that loses, and harmless uses pass."""

import numpy as np
import onnx
import pytest
from graphs import graph
from onnx import numpy_helper

import rewriter
from rewriter.ir.model import Array

STAMP = 1532402944.3
NEAR: dict[str, Array] = {
    "now": np.array([STAMP + 0.5]),
    "before": np.array([STAMP]),
    "x": np.linspace(-1, 1, 32, dtype=np.float32).reshape(2, 16),
}
WEIGHT = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32) / 4
INPUTS = "double[1] now, double[1] before, float[2,16] x"

LOST = {
    "a difference of two times": "d = Sub(now, before) f = Cast<to = 1>(d) t = Sin(f)",
    "the sum with the negative": "n = Neg(before) d = Add(now, n) f = Cast<to = 1>(d) t = Sin(f)",
    "the remainder of a time": """o = Constant<value = double {1.5}>() d = Mod<fmod = 1>(now, o)
        t = Cast<to = 1>(d)""",
    "in a branch": """c = Constant<value = bool {1}>()
        d = If(c) <then_branch = a () => (double[1] p) { p = Sub(now, before) },
                   else_branch = b () => (double[1] q) { q = Identity(now) }>
        t = Cast<to = 1>(d)""",
    "in a loop": """n = Constant<value = int64 {3}>() c = Constant<value = bool {1}>()
        d = Loop(n, c, now) <body = a (int64 i, bool k, double[1] s) => (bool k2, double[1] s2)
            { k2 = Identity(k) b = Sub(s, before) s2 = Add(b, before) }>
        e = Sub(d, before) t = Cast<to = 1>(e)""",
}
HARMLESS = {
    "a factor": "h = Constant<value = double {0.3}>() d = Cast<to = 11>(x) e = Mul(d, h) t = Cast<to = 1>(e)",
    "a mask of the least float64": """m = Constant<value = double {-1.7e308}>() d = Cast<to = 11>(x)
        e = Add(d, m) s = Softmax(e) f = Cast<to = 1>(s) t = Add(f, x)""",
    "times that differ by hours": """k = Constant<value = double {1e6}>() o = Sub(now, k) d = Sub(now, o)
        e = Div(d, k) t = Cast<to = 1>(e)""",
    "times as large as they are": "d = Div(now, before) t = Cast<to = 1>(d)",
}


def model(body: str) -> onnx.ModelProto:
    """Features of x in a network, plus what `body` makes of the times and of x."""
    proto = graph(
        f"""g ({INPUTS}, float[16,16] w) => (float[2,16] y) {{
            features = MatMul(x, w) {body} y = Add(features, t) }}"""
    ).proto
    del proto.graph.input[-1]
    proto.graph.initializer.append(numpy_helper.from_array(WEIGHT, "w"))
    return proto


def error(result: rewriter.FixResult) -> float:
    return max(output.relative_l2 for check in result.checks for output in check.outputs)


@pytest.mark.parametrize("case", LOST)
def test_what_float32_loses_of_float64_is_not_verified(case: str) -> None:
    source = model(LOST[case])
    result = rewriter.fix(source, inputs=[NEAR], build=False, engine="emulation")
    assert not result.verified
    assert error(result) > 0.02
    assert "pass it as an input" in result.conclusion.remedy
    checked = rewriter.verify(source, source, inputs=[NEAR], build=False, engine="emulation")
    assert not checked.passed


def test_scan_names_the_difference_and_what_to_do() -> None:
    found = rewriter.scan(model(LOST["a difference of two times"]), inputs=[NEAR]).findings
    (finding,) = (f for f in found if f.kind == "cancellation")
    assert finding.ops == ("Sub",)
    assert "pass it as an input" in finding.repair
    assert not any(f.kind == "tf32" for f in found)  # which is not to blame


@pytest.mark.parametrize("case", HARMLESS)
def test_harmless_float64_is_verified(case: str) -> None:
    result = rewriter.fix(model(HARMLESS[case]), inputs=[NEAR], build=False, engine="emulation")
    assert result.verified, str(result)
    assert result.conclusion.lowered


def test_a_float64_output_is_computed_in_fp32() -> None:
    """An expected value over bins that asks for 53 bits of its result, behind a network in FP16."""
    bins = ", ".join(f"{20 * 1.3**i:.3f}" for i in range(16))
    proto = graph(
        f"""g (float[2,16] x, float[16,16] w) => (double[2] y) <double[16] b = {{{bins}}}> {{
            h = MatMul(x, w) s = Softmax(h) d = Cast<to = 11>(s) m = Mul(d, b)
            o = Constant<value = int64[1] {{1}}>() y = ReduceSum<keepdims = 0>(m, o) }}"""
    ).proto
    del proto.graph.input[-1]
    proto.graph.initializer.append(numpy_helper.from_array(WEIGHT, "w"))
    result = rewriter.fix(proto, inputs=[{"x": NEAR["x"]}], build=False, engine="emulation")
    assert result.verified and result.plan is not None
    kept = {d.op for d in result.plan.decisions if d.rule == "float64"}
    assert kept == {"Softmax", "Mul", "ReduceSum"}
    assert not any(d.op == "MatMul" for d in result.plan.decisions)
