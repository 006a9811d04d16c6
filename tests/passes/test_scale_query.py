"""scale-query: scales that may move to Q, scales that may not, and equal scores."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import apply, graph, ops, random_feeds, run

from rewriter.model import Array, Model
from rewriter.passes.scale_query import ScaleQuery

MOVED = [
    pytest.param(
        "<float s = {0.125}> { a = MatMul(q, k) b = Mul(a, s) p = Softmax(b) }",
        ["Mul", "MatMul", "Softmax"],
        id="Mul",
    ),
    pytest.param(
        "<float s = {0.125}> { a = MatMul(q, k) b = Mul(s, a) p = Softmax(b) }",
        ["Mul", "MatMul", "Softmax"],
        id="Mul with the constant first",
    ),
    pytest.param(
        "<float s = {8.0}> { a = MatMul(q, k) b = Div(a, s) p = Softmax(b) }",
        ["Mul", "MatMul", "Softmax"],
        id="a Div by a power of two becomes a Mul",
    ),
    pytest.param(
        "<float[1,1,1] s = {0.5}> { a = MatMul(q, k) b = Mul(a, s) p = Softmax(b) }",
        ["Mul", "MatMul", "Softmax"],
        id="a scale with as many axes as the score",
    ),
    pytest.param(
        "<float s = {0.125}> { a = MatMul(q, k) b = Mul(a, s) c = Add(b, m) p = Softmax(c) }",
        ["Mul", "MatMul", "Add", "Softmax"],
        id="a mask is added",
    ),
    pytest.param(
        "<float s = {0.125}, float z = {-100.0}> {"
        " w = Greater(m, z) a = MatMul(q, k) b = Mul(a, s) c = Where(w, b, z) p = Softmax(c) }",
        ["Greater", "Mul", "MatMul", "Where", "Softmax"],
        id="a mask chooses",
    ),
    pytest.param(
        "<float s = {0.125}, int64[3] n = {2, 6, 6}> {"
        " a = MatMul(q, k) i = Cast<to = 1>(a) r = Reshape(i, n) t = Transpose<perm = [0, 2, 1]>(r)"
        " b = Mul(t, s) p = Softmax(b) }",
        ["Mul", "MatMul", "Cast", "Reshape", "Transpose", "Softmax"],
        id="what only moves values may stand between",
    ),
    pytest.param(
        "<float s = {0.125}, float h = {0.3}> {"
        " x = Mul(q, h) a = MatMul(x, k) b = Mul(a, s) p = Softmax(b) }",
        ["Mul", "MatMul", "Softmax"],
        id="Q's own scale absorbs a power of two",
    ),
    pytest.param(
        "<float s = {0.125}, float h = {0.5}> {"
        " a = MatMul(q, k) b = Mul(a, h) c = Mul(b, s) p = Softmax(c) }",
        ["Mul", "MatMul", "Softmax"],
        id="two scales in a row, in one run",
    ),
    pytest.param(
        "<float s = {0.125}, float h = {0.5}> {"
        " x = Mul(q, h) n = Neg(x) a = MatMul(x, k) b = Mul(a, s) c = Add(b, m) u = ReduceSum(n)"
        " d = Add(c, u) p = Softmax(d) }",
        ["Mul", "Neg", "Mul", "MatMul", "Add", "ReduceSum", "Add", "Softmax"],
        id="a scaled Q with other consumers keeps its own Mul",
    ),
]


def _attention(body: str, outputs: str = "float[2,6,6] p") -> Model:
    return graph(f"g (float[2,6,8] q, float[2,8,6] k, float[2,1,6] m) => ({outputs}) {body}")


@pytest.mark.parametrize(("body", "left"), MOVED)
def test_moved(body: str, left: list[str]) -> None:
    before = _attention(body)
    after, report = apply(ScaleQuery(), before)
    assert ops(after) == left
    assert report.changes
    assert not report.refusals
    feeds = random_feeds(before)
    np.testing.assert_array_equal(run(before, feeds)[0], run(after, feeds)[0])
    again, _ = apply(ScaleQuery(), after)
    assert again is after


ROUNDED = [
    pytest.param("<float s = {0.3535534}> { a = MatMul(q, k) b = Mul(a, s) p = Softmax(b) }", 1, id="Mul"),
    pytest.param("<float s = {2.828427}> { a = MatMul(q, k) b = Div(a, s) p = Softmax(b) }", 0, id="Div"),
    pytest.param(
        "<float s = {0.3535534}, float h = {0.3}> {"
        " x = Mul(q, h) a = MatMul(x, k) b = Mul(a, s) p = Softmax(b) }",
        2,
        id="two factors whose product would round stay two",
    ),
    pytest.param(
        "<float s = {2.828427}, float h = {0.5}> {"
        " x = Mul(q, h) a = MatMul(x, k) b = Div(a, s) p = Softmax(b) }",
        1,
        id="a Div is not turned into a rounded reciprocal",
    ),
]


@pytest.mark.parametrize(("body", "muls"), ROUNDED)
def test_rounded(body: str, muls: int) -> None:
    before = _attention(body)
    after, _ = apply(ScaleQuery(), before)
    assert ops(after).count("Mul") == muls
    assert ops(after)[-2:] == ["MatMul", "Softmax"]
    feeds = random_feeds(before, scale=3.0)
    (a,), (b,) = run(before, feeds), run(after, feeds)
    assert np.linalg.norm(a - b) <= ScaleQuery.exactness.tolerance * np.linalg.norm(a)


DECLINED = [
    pytest.param(
        "<float s = {0.125}> { a = MatMul(q, k) c = Add(a, m) b = Mul(c, s) p = Softmax(b) }",
        "is not linear",
        id="an Add before the scale",
    ),
    pytest.param(
        "<float s = {0.125}> { a = MatMul(q, k) c = Tanh(a) b = Mul(c, s) p = Softmax(b) }",
        "is not linear",
        id="soft-capping by Tanh before the scale",
    ),
    pytest.param(
        "<float s = {0.125}> {"
        " a = MatMul(q, k) h = Cast<to = 10>(a) c = Cast<to = 1>(h) b = Mul(c, s) p = Softmax(b) }",
        "is not linear",
        id="a rounding Cast before the scale",
    ),
    pytest.param(
        "<float s = {0.125}> { a = MatMul(q, k) b = Mul(a, s) n = Neg(a) c = Add(b, n) p = Softmax(c) }",
        "has other consumers",
        id="the bare score has other consumers",
    ),
    pytest.param(
        "<float s = {3.0}> { a = MatMul(q, k) b = Mul(a, s) p = Softmax(b) }",
        "would not make the score smaller",
        id="a factor above 1",
    ),
    pytest.param(
        "<float[1,1,1,1] s = {0.5}> { a = MatMul(q, k) b = Mul(a, s) c = Squeeze(b) p = Softmax(c) }",
        "may add axes",
        id="a scale with more axes than the score",
    ),
]


@pytest.mark.parametrize(("body", "reason"), DECLINED)
def test_declined(body: str, reason: str) -> None:
    before = _attention(body)
    after, report = apply(ScaleQuery(), before)
    assert after is before
    assert [reason in r.reason for r in report.refusals] == [True]


def test_a_score_that_is_a_graph_output_is_declined() -> None:
    before = _attention(
        "<float s = {0.125}> { a = MatMul(q, k) b = Mul(a, s) p = Softmax(b) }",
        "float[2,6,6] p, float[2,6,6] a",
    )
    after, report = apply(ScaleQuery(), before)
    assert after is before
    assert "a is a graph output" in report.refusals[0].reason


def test_the_scaled_score_may_be_a_graph_output() -> None:
    before = _attention(
        "<float s = {0.125}> { a = MatMul(q, k) b = Mul(a, s) p = Softmax(b) }",
        "float[2,6,6] p, float[2,6,6] b",
    )
    after, _ = apply(ScaleQuery(), before)
    assert ops(after) == ["Mul", "MatMul", "Softmax"]
    feeds = random_feeds(before)
    for a, b in zip(run(before, feeds), run(after, feeds), strict=True):
        np.testing.assert_array_equal(a, b)


SILENT = [
    pytest.param("{ a = MatMul(q, k) b = Mul(a, m) p = Softmax(b) }", id="a scale that is computed"),
    pytest.param("<float s = {0.125}> { a = MatMul(q, k) b = Mul(a, s) p = Relu(b) }", id="no Softmax"),
    pytest.param(
        "<float s = {0.125}> { a = MatMul(q, k) b = Div(s, a) p = Softmax(b) }", id="a constant over a score"
    ),
    pytest.param("{ a = MatMul(q, k) b = Add(a, m) p = Softmax(b) }", id="no scale"),
    pytest.param(
        "<float s = {0.125}> { a = MatMul(q, k) b = Mul(m, s) c = Add(a, b) p = Softmax(c) }",
        id="a scaled mask",
    ),
    pytest.param(
        "<float s = {0.0}> { a = MatMul(q, k) b = Mul(a, s) p = Softmax(b) }", id="a factor of zero"
    ),
]


@pytest.mark.parametrize("body", SILENT)
def test_skipped(body: str) -> None:
    before = _attention(body)
    after, report = apply(ScaleQuery(), before)
    assert after is before
    assert not report.refusals


def test_the_scale_is_gone_from_inside_the_matmul() -> None:
    """The reason for the pass: the largest value between Q and Softmax shrinks by the scale."""
    before = _attention("<float s = {0.03125}> { a = MatMul(q, k) b = Mul(a, s) p = Softmax(b) }")
    after, _ = apply(ScaleQuery(), before)
    feeds = random_feeds(before, scale=200.0)
    assert _largest(before, "a", feeds) > 65504 > _largest(after, "b", feeds)


def _largest(source: Model, tensor: str, feeds: dict[str, Array]) -> float:
    shown = source.copy()
    shown.proto.graph.output.add(name=tensor)
    return float(np.abs(run(shown, feeds)[-1]).max())


def test_attention_in_a_branch() -> None:
    before = graph(
        """
        g (float[2,6,8] q, float[2,8,6] k, bool c) => (float[2,6,6] y) <float s = {0.125}> {
            y = If (c) <
                then_branch = t () => (float[2,6,6] p) { a = MatMul(q, k) b = Mul(a, s) p = Softmax(b) },
                else_branch = e () => (float[2,6,6] v) { v = MatMul(q, k) }
            >
        }"""
    )
    after, _ = apply(ScaleQuery(), before)
    branch = after.proto.graph.node[0].attribute[0].g
    assert [n.op_type for n in branch.node] == ["Mul", "MatMul", "Softmax"]
    feeds = random_feeds(before)
    np.testing.assert_array_equal(run(before, feeds)[0], run(after, feeds)[0])
