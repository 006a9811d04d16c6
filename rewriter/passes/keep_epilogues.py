"""keep-epilogues: a view keeps what stands behind a matrix product in the product's kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import NodeProto

from rewriter.base import EXACT, Change, Context, Event, GraphPass, Refusal, Requires
from rewriter.graph import GraphEditor, attribute, label
from rewriter.graph.fusion import NORMS, after_products

MOST_AXES = 8
"""TensorRT's Dims::MAX_DIMS."""

@dataclass(frozen=True)
class KeepEpilogues(GraphPass):
    """TensorRT-RTX may compute the operators behind a matrix product in the kernel of what reads them.

    The product is then left with none, and sums in FP16. A norm takes them where it reads an FP32 sum itself,
    and where nothing but the norm reads what was summed (BERT, whose norms stand behind the sums; the last
    norm of every transformer). A Transpose takes them where nothing else reads them (SegFormer's, before its
    depthwise Convs). With a view between the two it is the product's kernel that computes them. Measured on
    one H200 with TensorRT-RTX 1.6.1, three layers of a BERT (128 tokens, width 768): 1.74e-3 in 89 us, with
    the view 7.4e-4 in 76 to 78 us, and with the norm in FP32, too, 4.1e-4 in 78 us. The number of kernels is
    the same; of SegFormer's Transposes it is known from the names of the kernels alone.

    Every LayerNormalization, RMSNormalization and Transpose whose data is computed elementwise behind a
    MatMul or Gemm gets an Unsqueeze of the first axis before it, and a Squeeze behind it.
    `mixed-precision{epilogues=true}` then keeps the norms in FP32.

    Declines:
        - a norm whose mean or deviation is read
        - data of 8 axes, the most that TensorRT has
        - a model below opset 13
    """

    name = "keep-epilogues"
    requires = Requires(opset=13)  # from there on Unsqueeze takes its axes as an input
    exactness = EXACT
    before = """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[2,4] x, float[2,3] r) => (float[2,3] y)
        <float[4,3] w = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 1.0, 2.0, 3.0},
         float[3] scale = {1.0, 2.0, 3.0}> {
            m = MatMul(x, w)
            s = Add(m, r)
            y = LayerNormalization<axis = -1>(s, scale)
        }"""
    after = """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[2,4] x, float[2,3] r) => (float[2,3] y)
        <float[4,3] w = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 1.0, 2.0, 3.0},
         float[3] scale = {1.0, 2.0, 3.0}, int64[1] axis = {0}> {
            m = MatMul(x, w)
            s = Add(m, r)
            u = Unsqueeze(s, axis)
            n = LayerNormalization<axis = -1>(u, scale)
            y = Squeeze(n, axis)
        }"""

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        epilogues = after_products(graph)
        for node in graph.nodes:
            if node.op_type in NORMS | {"Transpose"} and node.input[0] in epilogues:
                reason = _reason_against(graph, node)
                if reason is not None:
                    yield Refusal(label(node), reason)
                elif node.op_type == "Transpose":
                    rank = len(attribute(node, "perm", ())) or graph.rank(node.input[0])
                    if rank:
                        perm = attribute(node, "perm", range(rank)[::-1])
                        yield _lift(graph, node, perm=[0, *(axis + 1 for axis in perm)])
                else:
                    axis = attribute(node, "axis", -1)
                    yield _lift(graph, node, axis=axis + 1 if axis >= 0 else axis)


def _reason_against(graph: GraphEditor, node: NodeProto) -> str | None:
    if (graph.rank(node.input[0]) or 0) >= MOST_AXES:
        return f"{node.input[0]} has {MOST_AXES} axes, and TensorRT's tensors have no more"
    read = [name for name in node.output[1:] if name and (graph.consumers(name) or graph.is_output(name))]
    return f"{read[0]}, which it computes besides, is read" if read else None


def _lift(graph: GraphEditor, node: NodeProto, **axes: Any) -> Change:
    """Let the node compute on a tensor with one more axis in front; `axes` are its attributes for that."""
    data, result = node.input[0], node.output[0]
    lifted = graph.tensor(f"{result}/lifted", dtype=graph.dtype(data))
    inner = graph.tensor(f"{result}/inner", dtype=graph.dtype(result))
    first = graph.add_constant(f"{result}/axis", np.zeros(1, np.int64))
    attributes: dict[str, Any] = {a.name: attribute(node, a.name) for a in node.attribute} | axes
    graph.substitute(
        result,
        graph.make("Unsqueeze", [data, first], [lifted]),
        graph.make(node.op_type, [lifted, *node.input[1:]], [inner], name=node.name, **attributes),
        graph.make("Squeeze", [inner, first], [result]),
    )
    return Change(label(node), f"a view stands between it and {data}")
