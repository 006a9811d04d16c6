"""fuse-softmax: Softmax and LogSoftmax with equal results, and refusals with their reasons."""

import numpy as np
from graphs import apply, graph, run

from rewriter.ir.model import Model
from rewriter.passes.fuse_softmax import FuseSoftmax


def build(body: str, output: str = "float[2,8] y") -> Model:
    return graph(
        f"g (float[2,8] x) => ({output}) <int64[1] axis = {{1}}, int64[1] first = {{0}},"
        f" int64[2] both = {{0, 1}}, float least = {{-inf}}> {{ {body} }}"
    )


def test_the_operator_does_not_overflow() -> None:
    before = build("e = Exp(x) s = ReduceSum(e, axis) y = Div(e, s)")
    result, _ = apply(FuseSoftmax(), before)
    feeds = {"x": np.full((2, 8), 200, np.float32)}
    assert np.isnan(run(before, feeds)[0]).all()
    assert np.allclose(run(result, feeds)[0], 1 / 8)
