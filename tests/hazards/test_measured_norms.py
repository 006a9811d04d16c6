"""A decomposed norm that was measured in range keeps only its root in FP32; each condition with a refusal."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hazard_rules import found

from rewriter.hazards.survey import PrecisionRequest
from rewriter.ir.plan import Range

TRUSTING = PrecisionRequest(measured_norms=True)


def layer_norm(epsilon: float) -> str:
    return f"""
        g (float[2,8] x) => (float[2,8] y) <float two = {{2}}, float eps = {{{epsilon:.20f}}}> {{
            m = ReduceMean<axes = [-1]>(x)
            d = Sub(x, m)
            q = Pow(d, two)
            v = ReduceMean<axes = [-1]>(q)
            e = Add(v, eps)
            s = Sqrt(e)
            y = Div(d, s)
        }}"""


def rms_norm(epsilon: float) -> str:
    return f"""
        g (float[2,8] x) => (float[2,8] y)
        <float eps = {{{epsilon:.20f}}}, float one = {{1}}, float[8] w = {{1, 2, 3, 4, 5, 6, 7, 8}}> {{
            q = Mul(x, x)
            v = ReduceMean<axes = [-1]>(q)
            e = Add(v, eps)
            s = Sqrt(e)
            i = Div(one, s)
            n = Mul(x, i)
            y = Mul(n, w)
        }}"""


Given = Mapping[str, Range | tuple[float, float]]

SEEN: Given = {
    "x": (-60.0, 60.0),
    "m": (-1.0, 1.0),
    "d": (-60.0, 60.0),
    "q": (0.0, 3600.0),
    "v": (0.5, 900.0),
    "e": (0.5, 900.0),
    "s": (0.7, 30.0),
    "i": (0.03, 1.4),
    "n": (-4.0, 4.0),
    "y": (-4.0, 4.0),
}
WHOLE = "d e m q s v y"


@pytest.mark.parametrize(
    ("text", "ranges", "expected"),
    [
        pytest.param(layer_norm(1e-6), {}, "e s", id="in range: epsilon and root"),
        pytest.param(layer_norm(1e-3), {}, "", id="an epsilon that FP16 holds needs nothing"),
        pytest.param(layer_norm(1e-14), {}, WHOLE, id="an epsilon whose root FP16 does not hold"),
        pytest.param(layer_norm(1e-6), {"q": (0.0, 20000.0)}, WHOLE, id="squares want four times the room"),
        pytest.param(
            layer_norm(1e-6), {"v": (5e-5, 900.0), "e": (5e-5, 900.0)}, WHOLE, id="a variance below 2^-14"
        ),
        pytest.param(
            layer_norm(1e-6),
            {"x": Range(0.0, 900.0, 800.0, True)},
            WHOLE,
            id="a mean far above the deviation",
        ),
        pytest.param(rms_norm(1e-6), {}, "e i n q s v y", id="multiplied by the inverse: whole"),
        pytest.param(rms_norm(1e-14), {}, "e i n q s v y", id="FP32 divides by any root"),
        pytest.param(
            rms_norm(1e-14).replace("Div(one, s)", "Reciprocal(s)"),
            {},
            "e i n q s v y",
            id="and takes the reciprocal of any root",
        ),
        pytest.param(rms_norm(1e-6), {"q": (0.0, 20000.0)}, "e i n q s v y", id="squares out of range"),
    ],
)
def test_fp32_nodes_of_a_measured_norm(text: str, ranges: Given, expected: str) -> None:
    assert found("unfused_norm", text, {**SEEN, **ranges}, request=TRUSTING) == expected
    untrusting = found("unfused_norm", text, {**SEEN, **ranges})
    assert set(untrusting.split()) >= {"e", "q", "s", "v", "y"}


def test_an_unmeasured_norm_stays_in_fp32() -> None:
    seen = {name: r for name, r in SEEN.items() if name != "q"}
    assert found("unfused_norm", layer_norm(1e-6), seen, request=TRUSTING) == WHOLE


def test_bf16_has_too_few_bits_inside_a_norm() -> None:
    settings = PrecisionRequest("bf16", measured_norms=True)
    assert found("unfused_norm", layer_norm(1e-6), SEEN, request=settings) == WHOLE


def test_the_epsilon_rule_leaves_such_a_norm_alone() -> None:
    small = {**SEEN, "v": (0.5, 0.9), "e": (0.5, 0.9)}
    assert found("lost_epsilon", layer_norm(1e-6), small, request=TRUSTING) == ""
    assert found("lost_epsilon", layer_norm(1e-6), small) == "e q s v y"
