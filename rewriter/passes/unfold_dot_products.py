"""unfold-dot-products: the last product of a network, if it has one row, becomes Mul and ReduceSum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from rewriter.base import Change, Context, Event, Exactness, GraphPass, Kept, Refusal, Requires
from rewriter.graph import GraphEditor, attribute, label
from rewriter.model import Array
from rewriter.patterns.windows import reason_in_weight

@dataclass(frozen=True)
class UnfoldDotProducts(GraphPass):
    """A classifier's last product rounds what it reads and what it gives: Mul and ReduceSum round neither.

    With one row it has nothing for Tensor Cores: it takes as long as reading its weight. Written as Mul and
    ReduceSum, which mixed-precision{epilogues=true} keeps in FP32 with the pooling before them, it computes
    in FP32, and not in TF32 either. Measured on one H200 with TensorRT-RTX 1.6.1, a ResNet-50 without and
    with it: 5.9e-4 in 327 us, 5.5e-4 in 324 us.

    The weight stays FP32: twice the memory that it takes in FP16.

    Left alone without a word: products whose result is not an output, computed weights, more rows than one.

    Options:
        size: Most elements of a weight, in millions: reading one costs twice the time in FP32, 1.7 us for 4
            million on that GPU. Larger ones were not measured.

    Declines:
        - a product that --keep-fp32, --keep-fp32-op or an edited plan names
        - weights that are quantised, or that belong to a graph around this one
        - a Gemm that scales (alpha, beta) or turns what it reads (transA)
        - a model below opset 13
    """

    size: int = 4

    name = "unfold-dot-products"
    requires = Requires(opset=13)  # from there on ReduceSum takes its axes as an input
    exactness = Exactness(1e-5, "ONNX Runtime adds the same products in another order")
    before = """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[1,3] x) => (float[1,2] y)
        <float[2,3] w = {1.0, 2.0, 3.0, 0.1, 0.2, 0.3}, float[2] b = {0.5, 0.25}> {
            y = Gemm<transB = 1>(x, w, b)
        }"""
    after = """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[1,3] x) => (float[1,2] y)
        <float[2,3] w = {1.0, 2.0, 3.0, 0.1, 0.2, 0.3}, float[2] b = {0.5, 0.25},
         int64[1] axis = {1}, int64[2] row = {1, 2}> {
            products = Mul(x, w)
            sum = ReduceSum<keepdims = 0>(products, axis)
            biased = Add(sum, b)
            y = Reshape(biased, row)
        }"""

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        for node in graph.nodes:
            if not _is_head(graph, node, self.size * 10**6):
                continue
            reason = _reason_against(graph, node, context.kept)
            if reason is not None:
                yield Refusal(label(node), f"it stays a {node.op_type}: {reason}")
            else:
                yield _write(graph, node)


def _is_head(graph: GraphEditor, node: NodeProto, most: int) -> bool:
    """Whether it multiplies one row by a constant matrix for an output."""
    if node.op_type not in {"MatMul", "Gemm"} or node.domain not in {"", "ai.onnx"}:
        return False
    shape = graph.shape(node.input[0])
    one = shape is not None and len(shape) == 2 and shape[0] == 1
    if not one or graph.constant(node.input[0]) is not None or graph.rank(node.input[1]) != 2:
        return False
    weight = graph.constant(node.input[1])
    return weight is not None and weight.size <= most and graph.is_output(node.output[0])


def _reason_against(graph: GraphEditor, node: NodeProto, kept: Kept) -> str | None:
    option = next(kept.options(node), None)
    if option is not None:
        return f"it is kept in FP32 by {option}"
    if attribute(node, "transA", 0) or any(attribute(node, name, 1.0) != 1.0 for name in ("alpha", "beta")):
        return "it scales or turns what it reads"
    return reason_in_weight(graph, node.input[1])


def _write(graph: GraphEditor, node: NodeProto) -> Change:
    """Put the sums of products in the node's place."""
    out, dtype, name = node.output[0], graph.dtype(node.input[0]), label(node)
    weight = _rows(graph, node)
    count, depth = graph.shape(weight) or (None, None)
    axis = graph.add_constant(f"{out}/axis", np.asarray([1], np.int64))
    row = graph.add_constant(f"{out}/row", np.asarray([1, count], np.int64))
    products = graph.tensor(f"{out}/products", dtype=dtype, shape=(count, depth))
    last = graph.tensor(f"{out}/sums", dtype=dtype, shape=(count,))
    made = [
        graph.make("Mul", [node.input[0], weight], [products], name=f"{name}/Mul"),
        graph.make("ReduceSum", [products, axis], [last], name=f"{name}/ReduceSum", keepdims=0),
    ]
    if len(node.input) > 2 and node.input[2]:
        biased = graph.tensor(f"{out}/biased", dtype=dtype)
        made.append(graph.make("Add", [last, node.input[2]], [biased], name=f"{name}/Add"))
        last = biased
    graph.substitute(out, *made, graph.make("Reshape", [last, row], [out], name=f"{name}/Reshape"))
    return Change(name, f"{count} sums of {depth} products")


def _rows(graph: GraphEditor, node: NodeProto) -> str:
    """Name of the constant [results, depth]."""
    weight = node.input[1]
    if attribute(node, "transB", 0):
        return weight
    value = graph.constant(weight)
    assert value is not None, weight  # `_is_head` asked
    turned: Array = np.ascontiguousarray(value.T)
    return graph.add_constant(f"{weight}/turned", turned)
