"""fuse-softmax: Softmax and LogSoftmax with equal results, and refusals with their reasons."""

import numpy as np
from graphs import apply, graph, run

from rewriter.passes.fuse_softmax import FuseSoftmax


def test_the_operator_does_not_overflow() -> None:
    before = graph(
        "g (float[2,8] x) => (float[2,8] y) <int64[1] axis = {1}> "
        "{ e = Exp(x) s = ReduceSum(e, axis) y = Div(e, s) }"
    )
    result, _ = apply(FuseSoftmax(), before)
    feeds = {"x": np.full((2, 8), 200, np.float32)}
    assert np.isnan(run(before, feeds)[0]).all()
    assert np.allclose(run(result, feeds)[0], 1 / 8)
