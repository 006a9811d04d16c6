"""Residual sums between FP32 islands: they join where that needs no more Casts."""

from __future__ import annotations

import graphs
import pytest
from test_planner import kept, planned

from rewriter.planner import Wish

STREAM = """
    g (float[4,4] x) => (float[4,4] y) {
        s0 = MatMul(x, x)
        n0 = Exp(s0)
        b0 = MatMul(n0, n0)
        s1 = Add(s0, b0)
        n1 = Exp(s1)
        b1 = MatMul(n1, n1)
        s2 = Add(b1, s1)
        n2 = Exp(s2)
        y = MatMul(n2, n2)
    }"""


def sums(text: str, wish: Wish) -> str:
    """Outputs of the sums that the plan keeps beside what the user asked for."""
    rules = kept(planned(graphs.graph(text), wish))
    assert set(rules.values()) <= {"user", "residual-sum"}
    return " ".join(name for name, rule in rules.items() if rule == "residual-sum")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(STREAM, "s1 s2", id="a stream between norms"),
        pytest.param(STREAM.replace("Add(b1, s1)", "Add(b1, b1)"), "s1 s2", id="two sums, each by itself"),
        pytest.param(
            STREAM.replace("n1 = Exp(s1)", "n1 = Neg(s1)"), "", id="a reader in FP16 would need one more"
        ),
        pytest.param(STREAM.replace("n2 = Exp(s2)", "n2 = Neg(s2)"), "", id="the stream ends in FP16"),
        pytest.param(
            STREAM.replace("(float[4,4] y) {", "(float[4,4] y) <float[4] c = {1, 2, 3, 4}> {").replace(
                "Add(s0, b0)", "Add(b0, c)"
            ),
            "s2",
            id="a bias is no residual",
        ),
        pytest.param(
            STREAM.replace("(float[4,4] y) {", "(float[4,4] y) <float[4] c = {1, 2, 3, 4}> {").replace(
                "s0 = MatMul(x, x)", "s0 = Add(x, c)"
            ),
            "s0 s1 s2",
            id="positions are where the stream begins",
        ),
    ],
)
def test_sums_join_where_no_cast_is_added(text: str, expected: str) -> None:
    assert sums(text, Wish(keep_ops=("Exp",))) == expected


def test_without_islands_nothing_grows() -> None:
    assert sums(STREAM, Wish()) == ""


def test_an_output_in_fp32_is_a_reader_in_fp32() -> None:
    text = """
        g (float[4,4] x) => (float[4,4] y) {
            a = Exp(x)
            b = MatMul(a, a)
            y = Add(b, x)
        }"""
    assert sums(text, Wish(keep_ops=("Exp",))) == "y"
    assert sums(text, Wish(keep_ops=("Exp",), io="fp16")) == ""
