"""FP32 epilogues: where they begin, how far they go, and what is left alone."""

from __future__ import annotations

from dataclasses import replace

import graphs
import pytest
from test_planner import kept, planned

from rewriter.base import Target
from rewriter.epilogues import PROBE
from rewriter.planner import Wish

WISH = Wish(epilogues=True)

HEAD = """
    g (float[2,4] x, float[2,4] r, float[4,4] v) => (float[2,4] y)
    <float[4,4] w = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}, float[4] b = {1,2,3,4}> {
"""
BIAS = f"{HEAD} m = MatMul(x, w)\n a = Add(m, b)\n y = MatMul(a, v) }}"


def epilogues(text: str, wish: Wish = WISH) -> str:
    """First outputs of the nodes that the rule keeps."""
    return " ".join(
        name for name, rule in kept(planned(graphs.graph(text), wish)).items() if rule == "epilogue"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(BIAS, "a", id="a bias"),
        pytest.param(BIAS.replace("Add(m, b)", "Add(b, m)"), "a", id="a bias that comes first"),
        pytest.param(BIAS.replace("Add(m, b)", "Add(m, r)"), "a", id="a residual sum"),
        pytest.param(BIAS.replace("MatMul(x, w)", "Gemm(x, w)"), "a", id="behind Gemm"),
        pytest.param(
            f"{HEAD} m = MatMul(x, w)\n a = Add(m, b)\n e = Erf(a)\n p = Mul(a, e)\n s = Add(p, r)\n"
            " y = MatMul(s, v) }",
            "a e p s",
            id="elementwise up to the next product",
        ),
        pytest.param(
            f"{HEAD} m = MatMul(x, w)\n a = Add(m, b)\n t = Transpose(a)\n u = Neg(t)\n y = MatMul(v, u) }}",
            "a",
            id="no further than a view",
        ),
        pytest.param(BIAS.replace("MatMul(x, w)", "MatMul(x, v)"), "", id="both operands are computed"),
        pytest.param(
            f"{HEAD} m = MatMul(x, w)\n a = Add(m, b)\n n = MatMul(x, w)\n c = Add(n, b)\n"
            " y = MatMul(a, c) }",
            "",
            id="products of one tensor, which are merged",
        ),
        pytest.param(BIAS.replace("Add(m, b)", "Mul(m, b)"), "", id="a product that nothing is added to"),
        pytest.param(
            f"{HEAD} m = MatMul(x, w)\n a = Add(m, b)\n y = MatMul(a, m) }}",
            "",
            id="a product that is read in FP16, too",
        ),
    ],
)
def test_what_is_an_epilogue(text: str, expected: str) -> None:
    assert epilogues(text) == expected


def test_conv_sums_in_fp16_all_the_same() -> None:
    text = """
        g (float[1,4,2,2] x) => (float[1,4,2,2] y)
        <float[4,4,1,1] w = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}, float[4,1,1] b = {1,2,3,4}> {
            m = Conv(x, w)
            a = Add(m, b)
            y = Conv(a, w)
        }"""
    assert epilogues(text) == ""


@pytest.mark.parametrize(
    "wish",
    [
        pytest.param(Wish(), id="nobody asked"),
        pytest.param(replace(WISH, precision="bf16"), id="BF16 sums in FP32 anyway"),
        pytest.param(replace(WISH, target=Target(answers={PROBE: "fp16"})), id="the GPU says no"),
    ],
)
def test_left_alone(wish: Wish) -> None:
    assert epilogues(BIAS, wish) == ""
    assert epilogues(BIAS, replace(wish, precision="fp16", epilogues=True, target=Target())) == "a"


def test_a_product_in_fp32_has_no_epilogue() -> None:
    assert epilogues(BIAS, replace(WISH, keep_nodes=("m",))) == ""


def test_the_reason_names_the_product() -> None:
    plan = planned(graphs.graph(BIAS), WISH)
    assert [d.reason for d in plan.decisions] == ["MatMul(m) sums in FP32 where this Add reads it in FP32"]
