"""decompose-dot-products: replaces a network's last product, if it has one row, by Mul and ReduceSum."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from rewriter.base.text import article
from rewriter.base.text import count as counted
from rewriter.ir.graph import GraphEditor, is_op
from rewriter.ir.graph.match import optional_input
from rewriter.ir.graph.ops import PRODUCTS
from rewriter.ir.graph.weights import NewWeights, Replacement, gemm_obstacle, is_transposed, layout_obstacle
from rewriter.passes.base import Change, Context, Event, Exactness, Requires, WeightPass, refused

LARGEST = 4_000_000
"""Elements of a weight: reading one takes twice the time in FP32, and larger ones were not measured."""


@dataclass(frozen=True)
class DecomposeDotProducts(WeightPass):
    """A classifier's last product rounds its input and its result: Mul and ReduceSum round neither.

    With one row it takes as long as reading its weight, on Tensor Cores or not. As Mul and ReduceSum it stays
    FP32 with the pooling before it, without TF32: a ResNet-50 becomes more accurate and no slower
    (docs/accuracy.md#nets-of-convs). The weight needs twice the memory.

    Skipped without a report: products whose result is no output, computed weights, more than one row, and
    weights of more than 4 million elements.

    Declines:
        - a Gemm that scales (alpha, beta) or transposes its input (transA)
    """

    requires = Requires(opset=13)  # from there on ReduceSum takes its axes as an input
    exactness = Exactness(1e-5, "ONNX Runtime adds the same products in another order")
    example = """
         g (float[1,3] x) => (float[1,2] y)
        -<float[2,3] w = {1.0, 2.0, 3.0, 0.1, 0.2, 0.3}, float[2] b = {0.5, 0.25}> {
        -    y = Gemm<transB = 1>(x, w, b)
        +<float[2,3] w = {1.0, 2.0, 3.0, 0.1, 0.2, 0.3}, float[2] b = {0.5, 0.25},
        + int64[1] axis = {1}, int64[2] row = {1, 2}> {
        +    products = Mul(x, w)
        +    sum = ReduceSum<keepdims = 0>(products, axis)
        +    biased = Add(sum, b)
        +    y = Reshape(biased, row)
         }"""

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        for node in graph.nodes:
            if _is_head(graph, node):
                obstacle = gemm_obstacle(node) or layout_obstacle(graph, node.input[1])
                reason = context.kept.reason(node) or obstacle
                yield refused(node, f"it stays {article(node.op_type)}", reason) or _write(graph, node)


def _is_head(graph: GraphEditor, node: NodeProto) -> bool:
    """True if the node multiplies one row by a constant matrix to give an output."""
    shape = graph.shape(node.input[0]) if is_op(node, *PRODUCTS) else None
    one = shape is not None and len(shape) == 2 and shape[0] == 1
    if not one or graph.constant(node.input[0]) is not None or graph.rank(node.input[1]) != 2:
        return False
    weight = graph.constant(node.input[1])
    return weight is not None and weight.size <= LARGEST and graph.is_output(node.output[0])


def _write(graph: GraphEditor, node: NodeProto) -> Change:
    out, weight, new = node.output[0], node.input[1], Replacement(graph, node)
    if not is_transposed(node):
        weight = NewWeights(graph).changed(weight, "turned", np.transpose)
    count, depth = graph.value(weight).shape
    axis, row = graph.add_ints(f"{out}/axis", 1), graph.add_ints(f"{out}/row", 1, count)
    products = new.add("Mul", [node.input[0], weight], new.tensor("products", (count, depth)))
    last = new.add("ReduceSum", [products, axis], new.tensor("sums", (count,)), keepdims=0)
    if bias := optional_input(node, 2):
        last = new.add("Add", [last, bias], new.tensor("biased"))
    new.finish("Reshape", [last, row])
    return Change(new.name, f"{counted(count, 'sum')} of {counted(depth, 'product')}")
