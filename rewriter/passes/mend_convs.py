"""mend-convs: a bias of zeros, or a Pad of its own, where TensorRT-RTX computes a Conv wrongly without."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from rewriter.hazards.quirks import may_be_repaired_by, of_chains
from rewriter.ir.base import Change, Context, Event, GraphPass
from rewriter.ir.graph import GraphEditor, label


@dataclass(frozen=True)
class MendConvs(GraphPass):
    """TensorRT-RTX computes some Convs wrongly, or crashes at them; a small change gives them another kernel.

    A pointwise FP16 Conv without a bias errs altogether if all heads that are made of it meet the same keys,
    as in MobileNetV5, and the build crashes at a gated one of a series: a bias of zeros costs nothing. A Conv
    that writes its rows into a padded image shears it, in FP32, too: between Unsqueeze and Squeeze, the Pad
    is a kernel of its own (docs/engines.md#convs).

    It follows `rewriter probe`: it acts where the target was wrong and not where it was right. Without probe
    results it acts for releases with the defect.
    """

    name = "mend-convs"
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
        concerned = may_be_repaired_by(self.name, context.target)
        wrong = (n for q in concerned for n in of_chains(graph, q, ("Pad" if "Pad" in q.chain else "Conv",)))
        for node in {id(node): node for node in wrong}.values():
            yield _with_bias(graph, node) if node.op_type == "Conv" else _by_itself(graph, node)


def _with_bias(graph: GraphEditor, conv: NodeProto) -> Event:
    sizes = graph.sizes(conv.input[1])
    assert sizes is not None  # the rows of the table ask for them
    conv.input.append("")
    zeros = graph.add_constant(f"{conv.output[0]}/zeros", np.zeros(sizes[0]), like=conv.input[1])
    graph.set_input(conv, 2, zeros)
    return Change(label(conv), "a bias of zeros")


def _by_itself(graph: GraphEditor, pad: NodeProto) -> Event:
    data, result, first = pad.input[0], pad.output[0], graph.add_ints(f"{pad.output[0]}/first", 0)
    before, after = np.split(graph.value(pad.input[1]), 2)
    shapes = [(1, *shape) if (shape := graph.shape(tensor)) else None for tensor in (data, result)]
    one = [graph.tensor(f"{result}/image", like=data, shape=s) for s in shapes]
    sizes = graph.add_ints(f"{result}/sizes", 0, *before, 0, *after)
    graph.substitute(
        result,
        graph.make("Unsqueeze", [data, first], [one[0]]),
        graph.again(pad, [one[0], sizes, *pad.input[2:]], [one[1]]),
        graph.make("Squeeze", [one[1], first], [result]),
    )
    return Change(label(pad), "a kernel of its own")
