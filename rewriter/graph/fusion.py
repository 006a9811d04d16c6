"""Of which operators TensorRT makes one kernel, as far as types and results depend on it.

Seen on one H200 with TensorRT-RTX 1.6.1, strongly typed; the names of fused kernels stand in the library's
verbose log, also where it builds without a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from onnx import NodeProto

from rewriter.graph import GraphView, attribute, is_op
from rewriter.graph.ops import CONVOLUTIONS, ELEMENTWISE, NORMS, PRODUCTS, REDUCTIONS, SOFTMAX

_REDUCING = NORMS | REDUCTIONS | SOFTMAX | {"GlobalAveragePool", "GlobalMaxPool"}


def is_depthwise(node: NodeProto, weight: Sequence[object]) -> bool:
    """Whether each group of a Conv or ConvTranspose reads one channel: Tensor Cores have nothing to do then.

    Args:
        weight: Shape of the node's weight; () if it is not known, which gives False.
    """
    grouped = node.op_type in CONVOLUTIONS and attribute(node, "group", 1) > 1
    if not grouped or len(weight) < 2:
        return False
    return weight[1] == 1 if node.op_type == "Conv" else weight[0] == attribute(node, "group", 1)


def is_plain_transpose(node: NodeProto) -> bool:
    """Whether it is a dense ConvTranspose of stride 1, as those are that were measured to sum in FP32."""
    if not is_op(node, "ConvTranspose"):
        return False
    return bool(attribute(node, "group", 1) == math.prod(attribute(node, "strides", [1])) == 1)


def conv_depth(node: NodeProto, weight: Sequence[int]) -> int:
    """How many products one element of a Conv's result sums; of a ConvTranspose's, on average.

    Args:
        weight: Shape of the node's weight; () if it is not known, which gives 1.
    """
    if node.op_type == "Conv":
        return math.prod(weight[1:])
    read = next(iter(weight), 1) // int(attribute(node, "group", 1))
    overlap = max(1, int(math.prod(attribute(node, "strides", [1]))))
    return max(1, read * math.prod(weight[2:]) // overlap)


def reduces(node: NodeProto) -> bool:
    """Whether the operator's kernel takes what is elementwise before it, away from a product's."""
    return node.op_type in _REDUCING


def behind_products(graph: GraphView) -> set[str]:
    """What matrix products by constants compute, and what is computed elementwise behind them."""
    found: set[str] = set()
    for node in graph.nodes:
        product = node.op_type in PRODUCTS and any(
            graph.constant(name) is not None for name in node.input[:2]
        )
        follows = node.op_type in ELEMENTWISE | {"Cast"} and not found.isdisjoint(node.input)
        if product or follows:
            found.update(node.output)
    return found
