"""float64, which TensorRT computes as float32: every check sees what that loses, and harmless uses pass."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import graph, with_weights

import rewriter
from rewriter.ir.model import Array, save
from rewriter.runtime.engines.onnxruntime import Session
from rewriter.verification.verdict import deciding

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
    text = f"""g ({INPUTS}, float[16,16] w) => (float[2,16] y) {{
        features = MatMul(x, w) {body} y = Add(features, t) }}"""
    return with_weights(text, {"w": WEIGHT}).whole()


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
    text = f"""g (float[2,16] x, float[16,16] w) => (double[2] y) <double[16] b = {{{bins}}}> {{
        h = MatMul(x, w) s = Softmax(h) d = Cast<to = 11>(s) m = Mul(d, b)
        o = Constant<value = int64[1] {{1}}>() y = ReduceSum<keepdims = 0>(m, o) }}"""
    proto = with_weights(text, {"w": WEIGHT}).whole()
    result = rewriter.fix(proto, inputs=[{"x": NEAR["x"]}], build=False, engine="emulation")
    assert result.verified and result.plan is not None
    kept = {d.op for d in result.plan.decisions if d.rule == "float64"}
    assert kept == {"Softmax", "Mul", "ReduceSum"}
    assert not any(d.op == "MatMul" for d in result.plan.decisions)


SAMPLES = [
    {"x": np.random.default_rng(seed).standard_normal((4, 64)).astype(np.float32)} for seed in range(3)
]
DRAWN = {
    "RandomNormal": "n = RandomNormal <shape = [4, 64]> () y = Add(x, n)",
    "RandomNormalLike": "a = Add(x, x) n = RandomNormalLike(a) y = Mul(a, n)",
    "RandomUniform": "n = RandomUniform <shape = [4, 64]> () y = Mul(x, n)",
    "RandomUniformLike": "n = RandomUniformLike(x) m = RandomUniformLike(x) d = Sub(n, m) y = Mul(x, d)",
    "Bernoulli": "p = Sigmoid(x) n = Bernoulli(p) y = Mul(x, n)",
    "Multinomial": "i = Multinomial <sample_size = 64> (x) n = Cast <to = 1> (i) y = Add(x, n)",
    "Dropout": "y, m = Dropout(x, ratio, train)",
    "a seed of its own": "n = RandomNormalLike <seed = 3.0> (x) y = Add(x, n)",
    "a branch": """c = Constant <value = bool {1}> () y = If(c) <
        then_branch = t () => (float[4,64] a) { n = RandomNormalLike(x) a = Add(x, n) },
        else_branch = e () => (float[4,64] b) { b = Neg(x) }>""",
}
HEADER = "g (float[4,64] x) => (float[4,64] y) <float ratio = {0.3}, bool train = {1}>"


@pytest.mark.parametrize("name", DRAWN)
def test_both_models_get_the_same_noise(name: str, tmp_path: Path) -> None:
    source, fixed = save(graph(f"{HEADER} {{ {DRAWN[name]} }}"), tmp_path / "net.onnx"), tmp_path / "f.onnx"
    result = rewriter.fix(source, fixed, inputs=SAMPLES, build=False)
    checks = [check for check in result.checks if check.name in ("structure", "emulation", "tf32")]
    assert checks and all(check.passed for check in checks), [check.summary for check in checks]
    assert max(output.relative_l2 for output in result.before) < 2e-3, "plain FP16 gets it, too"
    again = rewriter.verify(source, fixed, inputs=SAMPLES, build=False, engine="emulation")
    first, second = deciding(result.checks), deciding(again.checks)
    assert first and second and first.outputs[0].relative_l2 == second.outputs[0].relative_l2


def test_a_voice_whose_noise_decides_its_length_is_no_defect_of_a_pass() -> None:
    """As in VITS: durations are drawn, and rounded up to whole frames."""
    voice = graph(
        """g (float[1,32] x) => (float[1,N] y)
        <int64[1] axes = {1}, float one = {1.0}, int64[1] flat = {-1}, int64[1] zero = {0}> {
            n = RandomNormalLike(x) s = Exp(x) d = Mul(n, s) a = Abs(d) c = Ceil(a) t = ReduceSum(c, axes)
            k = Cast <to = 7> (t) shape = Reshape(k, flat) o = Expand(one, shape) r = RandomNormalLike(o)
            h = Tanh(r) y = Unsqueeze(h, zero) }"""
    )
    samples = [{"x": 0.5 * sample["x"][:1, :32]} for sample in SAMPLES]
    result = rewriter.fix(voice.whole(), inputs=samples, build=False, keep_fp32_op=["Exp", "Mul", "Abs"])
    assert all(check.passed for check in result.checks if check.name in ("structure", "emulation"))


def test_noise_is_drawn_anew_by_another_node_and_the_same_in_each_run() -> None:
    body = "y = RandomNormalLike(x) z = RandomNormalLike(x)"
    model = graph(f"g (float[4,64] x) => (float[4,64] y, float[4,64] z) {{ {body} }}")
    with Session(model) as session:
        first, second = session.run(SAMPLES[0]), session.run(SAMPLES[1])
    assert np.array_equal(first["y"], second["y"]) and not np.array_equal(first["y"], first["z"])
