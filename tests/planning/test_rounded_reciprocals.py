"""Divisions by constants: which stay FP32 alone, and how the emulation computes those that do not."""

import numpy as np
import pytest
from graphs import graph, run
from onnx import TensorProto

import rewriter
from rewriter.hazards.planning.free_fp32 import LEAST_BIAS, reciprocal_bias
from rewriter.ir.graph.casts import TypeRequest, retype
from rewriter.ir.model import Model
from rewriter.runtime.emulation import emulation

FEEDS = {"x": np.linspace(1.0, 2.0, 64, dtype=np.float32).reshape(1, 64)}


def divided(divisor: str, end: str = "y = Relu(b)") -> Model:
    return graph(
        f"g (float[1,64] x) => (float[1,64] y) <float c = {{{divisor}}}, float t = {{3.0}}> "
        f"{{ a = Add(x, t) b = Div(a, c) {end} }}"
    )


def kept(source: Model, **options: object) -> dict[str, str]:
    """The nodes that `fix` keeps in FP32, by their rules."""
    result = rewriter.fix(source.whole(), inputs=FEEDS, verify=False, skip=["simplify"], **options)  # type: ignore[arg-type]
    assert result.plan is not None
    return {decision.op: decision.rule for decision in result.plan.decisions}


ALONE = {"Div": "rounded-reciprocal"}


@pytest.mark.parametrize(
    ("divisor", "rules"),
    [
        pytest.param("6.0", ALONE, id="6: FP32 alone"),
        *(
            pytest.param(power, {}, id=f"{power}: a power of two is exact")
            for power in ("8.0", "0.25", "1.0")
        ),
        pytest.param("35.5", {}, id="4.6e-5, three quarters of the least bias"),
        pytest.param("29.0", ALONE, id="6.1e-5, a quarter of a rounding"),
    ],
)
def test_a_reciprocal_that_fp16_rounds_stays_fp32(divisor: str, rules: dict[str, str]) -> None:
    assert kept(divided(divisor)) == rules


def test_the_evidence_is_the_dividend() -> None:
    result = rewriter.fix(divided("6.0").whole(), inputs=FEEDS, verify=False, skip=["simplify"])
    assert result.plan is not None
    (decision,) = result.plan.decisions
    assert decision.tensor == "a"
    assert decision.reason == "FP16 rounds the reciprocal of 6 by 2.4e-04; FP32 costs nothing"


@pytest.mark.parametrize("function", ["Erf", "Sigmoid", "Tanh"])
def test_the_argument_of_a_bounded_function_stays_fp16(function: str) -> None:
    """As in GELU: a bias of it adds up no further."""
    assert kept(divided("1.4142135", f"y = {function}(b)")) == {}
    assert kept(divided("1.4142135", f"d = {function}(b) y = Mul(d, b)")) == {"Div": "rounded-reciprocal"}


def test_the_bias_of_one_sixth_is_the_measured_one() -> None:
    assert reciprocal_bias(6.0) == pytest.approx(2.35e-4, rel=0.05)
    assert reciprocal_bias(6.0) > LEAST_BIAS > reciprocal_bias(4.0) == 0.0
    assert reciprocal_bias(0.0) == 0.0


def emulated(source: Model) -> np.ndarray:
    """The result of the model in FP16, emulated."""
    low = retype(source, TypeRequest(lambda _scope, _node: TensorProto.FLOAT16))
    (result,) = run(emulation(low), {"x": FEEDS["x"].astype(np.float32)})
    return np.asarray(result, np.float64)


def test_the_emulation_multiplies_by_the_rounded_reciprocal() -> None:
    exact = (FEEDS["x"].astype(np.float64) + 3.0) / 6.0
    slope = float(np.mean(emulated(divided("6.0")) / exact)) - 1.0
    assert slope == pytest.approx(-2.35e-4, rel=0.2)
    assert abs(float(np.mean(emulated(divided("8.0")) / (exact * 6.0 / 8.0))) - 1.0) < 5e-5


def test_a_quotient_that_only_the_output_reads_stays_fp16_and_is_exact() -> None:
    source = graph(
        "g (float[1,64] x) => (float[1,64] y) <float c = {6.0}, float t = {3.0}> {"
        " a = Add(x, t) y = Div(a, c) }"
    )
    assert kept(source) == {}
    exact = (FEEDS["x"].astype(np.float64) + 3.0) / 6.0
    assert abs(float(np.mean(emulated(source) / exact)) - 1.0) < 5e-5
