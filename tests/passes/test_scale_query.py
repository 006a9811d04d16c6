"""scale-query: scales that may move to Q, scales that may not, and equal scores."""

from __future__ import annotations

import numpy as np
from graphs import apply, graph, random_feeds, run

from rewriter.ir.model import Array, Model
from rewriter.passes.scale_query import ScaleQuery


def _attention(body: str, outputs: str = "float[2,6,6] p") -> Model:
    return graph(f"g (float[2,6,8] q, float[2,8,6] k, float[2,1,6] m) => ({outputs}) {body}")


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
