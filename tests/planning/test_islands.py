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


def sums(text: str, wish: PrecisionRequest) -> str:
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
    ],
)
def test_sums_join_where_no_cast_is_added(text: str, expected: str) -> None:
    assert sums(text, PrecisionRequest(keep_ops=("Exp",))) == expected


EMBEDDED = """
    g (float[1,4] x, int64[2] ids) => (float[2,2] y)
    <float[3,2] table = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6}, float[2] c = {1.5, 2.5}, float[2] d = {0.5, 0.25},
     float[2,2] w = {1.0, 2.0, 3.0, 4.0}> {
        e = Gather(table, ids)
        a = Add(e, c)
        s = Add(a, d)
        n = Exp(s)
        y = MatMul(n, w)
    }"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(EMBEDDED, "a s", id="the sum of embeddings begins a stream"),
        pytest.param(
            EMBEDDED.replace("e = Gather(table, ids)", "f = Gather(table, ids) e = MatMul(f, w)"),
            "",
            id="a bias begins none",
        ),
        pytest.param(
            EMBEDDED.replace(
                "e = Gather(table, ids)", "f = Gather(table, ids) g = MatMul(f, w) e = Identity(g)"
            ),
            "",
            id="nor a bias after a view",
        ),
        pytest.param(
            EMBEDDED.replace("e = Gather(table, ids)", "f = Gather(table, ids) e = Neg(f)"),
            "",
            id="nor what is computed in FP16",
        ),
        pytest.param(EMBEDDED.replace("Add(a, d)", "Sub(a, d)"), "", id="nor another operator"),
    ],
)
def test_where_a_stream_begins(text: str, expected: str) -> None:
    rules = kept(planned(graphs.graph(text), PrecisionRequest(keep_ops=("Exp",))))
    assert " ".join(name for name, rule in rules.items() if rule == "residual-sum") == expected


def test_sums_of_constants_after_a_residual_sum_do_not_split_the_stream() -> None:
    text = """
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
    assert sums(text, PrecisionRequest(keep_ops=("Exp",))) == "s"


def test_a_mask_does_not_join_a_softmax_that_the_user_keeps() -> None:
    text = """
        g (float[1,2,4,4] x) => (float[1,2,4,4] y) <float s = {0.5}, float[4] mask = {0.0, 0.0, 0.0, -1e4}> {
            q = Neg(x)
            m = MatMul(q, q)
            a = Mul(m, s)
            t = Add(a, mask)
            p = Softmax(t)
            y = MatMul(p, q)
        }"""
    assert sums(text, PrecisionRequest(keep_ops=("Softmax",))) == ""


def test_without_islands_nothing_grows() -> None:
    assert sums(STREAM, PrecisionRequest()) == ""


def test_an_output_in_fp32_is_a_reader_in_fp32() -> None:
    text = """
        g (float[4,4] x) => (float[4,4] y) {
            a = Exp(x)
            b = MatMul(a, a)
            y = Add(b, x)
        }"""
    assert sums(text, PrecisionRequest(keep_ops=("Exp",))) == "y"
    assert sums(text, PrecisionRequest(keep_ops=("Exp",), io="fp16")) == ""
