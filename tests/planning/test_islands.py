"""Residual sums between FP32 islands: they join where that needs no more Casts."""

from __future__ import annotations

import graphs
import pytest
from plans import kept, planned

from rewriter.hazards.survey import PrecisionRequest

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


EMBEDDED = """
    g (float[1,4] x, int64[2] ids) => (float[2,2] y)
    <float[3,2] table = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6}, float[2] c = {1.5, 2.5}, float[2] d = {0.5, 0.25},
     float[2,2] w = {1.0, 2.0, 3.0, 4.0}> {
        GATHER
        a = Add(e, c)
        s = Add(a, d)
        n = Exp(s)
        y = MatMul(n, w)
    }"""
GATHER = EMBEDDED.replace("GATHER", "e = Gather(table, ids)")
BIASED = STREAM.replace("(float[4,4] y) {", "(float[4,4] y) <float[4] c = {1, 2, 3, 4}> {")
CONSTANTS = """
    g (float[4,4] x) => (float[4,4] y, float[4,4] z)
    <float[4] k = {1, 2, 3, 4}, float[4] l = {2, 3, 4, 5}> {
        n = Exp(x)
        b = MatMul(n, n)
        s = Add(x, b)
        e = Exp(s)
        c = Add(s, k)
        d = Add(s, l)
        y = MatMul(c, e)
        z = MatMul(d, e)
    }"""
MASKED = """
    g (float[1,2,4,4] x) => (float[1,2,4,4] y) <float s = {0.5}, float[4] mask = {0.0, 0.0, 0.0, -1e4}> {
        q = Neg(x)
        m = MatMul(q, q)
        a = Mul(m, s)
        t = Add(a, mask)
        p = Softmax(t)
        y = MatMul(p, q)
    }"""
OUTPUT = "g (float[4,4] x) => (float[4,4] y) { a = Exp(x) b = MatMul(a, a) y = Add(b, x) }"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(STREAM, "s1 s2", id="a stream between norms"),
        pytest.param(STREAM.replace("Add(b1, s1)", "Add(b1, b1)"), "s1 s2", id="two sums, each by itself"),
        pytest.param(STREAM.replace("n1 = Exp", "n1 = Neg"), "", id="a reader in FP16 would need one more"),
        pytest.param(STREAM.replace("n2 = Exp", "n2 = Neg"), "", id="the stream ends in FP16"),
        pytest.param(BIASED.replace("Add(s0, b0)", "Add(b0, c)"), "s2", id="a bias is no residual"),
        pytest.param(CONSTANTS, "s", id="sums of constants after a residual sum do not split the stream"),
        pytest.param(OUTPUT, "y", id="an output in FP32 is a reader in FP32"),
        pytest.param(GATHER, "a s", id="the sum of embeddings begins a stream"),
        pytest.param(
            EMBEDDED.replace("GATHER", "f = Gather(table, ids) e = MatMul(f, w)"), "", id="a bias begins none"
        ),
        pytest.param(
            EMBEDDED.replace("GATHER", "f = Gather(table, ids) g = MatMul(f, w) e = Identity(g)"),
            "",
            id="nor a bias after a view",
        ),
        pytest.param(
            EMBEDDED.replace("GATHER", "f = Gather(table, ids) e = Neg(f)"), "", id="nor an FP16 result"
        ),
        pytest.param(GATHER.replace("Add(a, d)", "Sub(a, d)"), "", id="nor another operator"),
    ],
)
def test_sums_join_where_no_cast_is_added(text: str, expected: str) -> None:
    assert sums(text, PrecisionRequest(keep_ops=("Exp",))) == expected


@pytest.mark.parametrize(
    ("text", "wish"),
    [
        pytest.param(STREAM, PrecisionRequest(), id="no islands"),
        pytest.param(OUTPUT, PrecisionRequest(keep_ops=("Exp",), io="fp16"), id="an output in FP16"),
        pytest.param(MASKED, PrecisionRequest(keep_ops=("Softmax",)), id="a mask before the user's Softmax"),
    ],
)
def test_nothing_grows(text: str, wish: PrecisionRequest) -> None:
    assert sums(text, wish) == ""


def sums(text: str, wish: PrecisionRequest) -> str:
    """Outputs of the sums that the plan keeps beside what the user asked for."""
    rules = kept(planned(graphs.graph(text), wish))
    return " ".join(name for name, rule in rules.items() if rule == "residual-sum")
