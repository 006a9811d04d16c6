"""Models that draw random numbers: the original and the result get the same ones where they are compared."""

from pathlib import Path

import numpy as np
import pytest
from graphs import graph

import rewriter
from rewriter.ir.model import save
from rewriter.runtime.engines.onnxruntime import Session
from rewriter.verification.verdict import deciding

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
