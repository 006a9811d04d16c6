"""fuse-softmax: Softmax and LogSoftmax with equal results, and refusals with their reasons."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import apply, graph, ops, random_feeds, run

from rewriter.graph import attribute
from rewriter.model import Model
from rewriter.passes.fuse_softmax import FuseSoftmax

PEAK = "m = ReduceMax<axes = [1]>(x) d = Sub(x, m) e = Exp(d)"
FLAX = (
    "k = Constant<value_ints = [2, 1]>() p = ReduceMax<axes = [1], keepdims = 0>(x) q = Max(least, p)"
    " r = Reshape(q, k) w = Expand(r, k) d = Sub(x, w) e = Exp(d)"
    " t = ReduceSum<keepdims = 0>(e, axis) u = Reshape(t, k) v = Expand(u, k)"
)


def build(body: str, output: str = "float[2,8] y") -> Model:
    return graph(
        f"g (float[2,8] x) => ({output}) <int64[1] axis = {{1}}, int64[1] first = {{0}},"
        f" int64[2] both = {{0, 1}}, float least = {{-inf}}> {{ {body} }}"
    )


WRITTEN = [
    pytest.param(f"{PEAK} s = ReduceSum(e, axis) y = Div(e, s)", "Softmax", id="over its sum"),
    pytest.param(
        f"{PEAK} s = ReduceSum(e, axis) i = Reciprocal(s) y = Mul(i, e)", "Softmax", id="inverse sum"
    ),
    pytest.param("e = Exp(x) s = ReduceSum(e, axis) y = Div(e, s)", "Softmax", id="without the maximum"),
    pytest.param(f"{FLAX} y = Div(e, v)", "Softmax", id="jax.nn.softmax by jax2tf"),
    pytest.param(
        f"{PEAK} s = ReduceSum(e, axis) l = Log(s) y = Sub(d, l)", "LogSoftmax", id="jax.nn.log_softmax"
    ),
]


@pytest.mark.parametrize(("body", "op"), WRITTEN)
def test_every_way_to_write_it_becomes_the_operator(body: str, op: str) -> None:
    before = build(body)
    result, report = apply(FuseSoftmax(), before)
    (node,) = result.proto.graph.node
    assert (node.op_type, list(node.input), attribute(node, "axis")) == (op, ["x"], 1)
    assert not report.refusals
    feeds = random_feeds(before)
    assert np.allclose(run(before, feeds)[0], run(result, feeds)[0], rtol=1e-5, atol=1e-7)


def test_the_operator_does_not_overflow() -> None:
    before = build("e = Exp(x) s = ReduceSum(e, axis) y = Div(e, s)")
    result, _ = apply(FuseSoftmax(), before)
    feeds = {"x": np.full((2, 8), 200, np.float32)}
    assert np.isnan(run(before, feeds)[0]).all()
    assert np.allclose(run(result, feeds)[0], 1 / 8)


REFUSED = [
    pytest.param(
        f"{PEAK} s = ReduceSum(e, axis) y = Div(e, s)",
        "float[2,8] y, float[2,8] e",
        "e inside it is a graph output",
        id="the exponentials are an output",
    ),
    pytest.param(
        f"{PEAK} s = ReduceSum(e, axis) y = Div(e, s) z = Relu(s)",
        "float[2,8] y, float[2,1] z",
        "s inside it is also used by Relu(z)",
        id="the sum is used elsewhere",
    ),
    pytest.param(
        f"{PEAK} s = ReduceSum(e, first) y = Div(e, s)", "float[2,8] y", "one axis", id="two different axes"
    ),
    pytest.param(
        "m = ReduceMax<axes = [0, 1]>(x) d = Sub(x, m) e = Exp(d) s = ReduceSum(e, both) y = Div(e, s)",
        "float[2,8] y",
        "one axis",
        id="two axes at once",
    ),
]


@pytest.mark.parametrize(("body", "output", "reason"), REFUSED)
def test_refusals_and_their_reasons(body: str, output: str, reason: str) -> None:
    before = build(body, output)
    result, report = apply(FuseSoftmax(), before)
    assert result.same_as(before)
    (refusal,) = report.refusals
    assert reason in refusal.reason


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("e = Exp(x) f = Neg(e) s = ReduceSum(e, axis) y = Div(f, s)", id="another numerator"),
        pytest.param(
            f"{PEAK} f = Exp(x) s = ReduceSum(f, axis) y = Div(e, s)", id="another shift in the sum"
        ),
        pytest.param(f"{PEAK} s = ReduceMean<axes = [1]>(e) y = Div(e, s)", id="over the mean"),
    ],
)
def test_what_only_looks_like_one(body: str) -> None:
    before = build(body)
    result, report = apply(FuseSoftmax(), before)
    assert result.same_as(before)
    assert not report.refusals


def test_attention_in_jax_gets_its_softmax() -> None:
    before = graph(
        """g (float[1,4,8] q, float[1,8,4] k) => (float[1,4,4] y) <int64[1] axis = {2}> {
            x = MatMul(q, k) m = ReduceMax<axes = [2]>(x) d = Sub(x, m) e = Exp(d)
            s = ReduceSum(e, axis) y = Div(e, s) }"""
    )
    assert ops(apply(FuseSoftmax(), before)[0]) == ["MatMul", "Softmax"]
