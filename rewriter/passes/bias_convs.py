"""bias-convs: gives a Conv a bias of zeros where TensorRT-RTX has a defect without one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rewriter.hazards.quirks import of_chains, table
from rewriter.ir.base import Change, Context, Event, GraphPass
from rewriter.ir.graph import GraphEditor, label


@dataclass(frozen=True)
class BiasConvs(GraphPass):
    """TensorRT-RTX computes some pointwise FP16 Convs without a bias wrongly, or crashes at them.

    One that makes queries of which all heads meet the same keys, as in MobileNetV4 and V5, errs altogether,
    and the build crashes at a gated one of a series. A bias of zeros gives both another kernel, which takes
    as long (docs/engines.md#pointwise-convs).

    It follows `rewriter probe`: it acts where the target was wrong and not where it was right. Without probe
    results it acts for releases with the defect.
    """

    name = "bias-convs"
    before = """
        g (float[1,4,2,2] x, float[4,4,1,1] w, float[2,2] k) => (float[1,2,4,2] y)
        <int64[4] heads = {1, 2, 2, 4}> {
            c = Conv(x, w)
            r = Reshape(c, heads)
            q = Transpose<perm = [0, 1, 3, 2]>(r)
            y = MatMul(q, k)
        }"""
    after = """
        g (float[1,4,2,2] x, float[4,4,1,1] w, float[2,2] k) => (float[1,2,4,2] y)
        <int64[4] heads = {1, 2, 2, 4}, float[4] zeros = {0, 0, 0, 0}> {
            c = Conv(x, w, zeros)
            r = Reshape(c, heads)
            q = Transpose<perm = [0, 1, 3, 2]>(r)
            y = MatMul(q, k)
        }"""

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        defects = [quirk for quirk in table() if quirk.steps == self.name]
        concerned = [quirk for quirk in defects if quirk.concerns(context.target) is not False]
        for conv in {id(n): n for quirk in concerned for n in of_chains(graph, quirk, ("Conv",))}.values():
            size = (graph.sizes(conv.input[1]) or ())[0]
            zeros = graph.add_constant(f"{conv.output[0]}/zeros", np.zeros(size), like=conv.input[1])
            conv.input.append("")
            graph.set_input(conv, 2, zeros)
            yield Change(label(conv), "a bias of zeros")
