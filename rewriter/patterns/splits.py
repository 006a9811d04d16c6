"""Recognises split products by the tag of the pass that wrote them."""

from __future__ import annotations

from onnx import NodeProto

from rewriter.graph import made_by

PASS = "split-products"
"""Name of that pass."""

RULE = "split"
"""Rule of its nodes that are FP32."""

REASON = "a part of a split product: FP16 cannot hold its parts and their sums"

US, US_PER_BYTE = 3.5, 1e-6
"""Extra time of a split product in microseconds: a constant, and for each byte of its weight in FP16, which
is read twice more. On an H200 with TensorRT-RTX 1.6.1, means of six networks: 3.1 where weights have
0.5 MB (RT-DETR), 4.7 with 1.2 (ViT-S), 7.1 and 7.4 with 4.7 (T5, BERT); docs/accuracy.md."""

_LOWERED = frozenset({"MatMul", "Reshape"})
"""Its nodes in FP16: the product, and the view before it, so that one Cast comes before both."""


def is_made(node: NodeProto) -> bool:
    """True if the pass made the node."""
    return made_by(node, (PASS,))


def is_part(node: NodeProto) -> bool:
    """True if it is a node of a split product that has to be FP32."""
    return is_made(node) and node.op_type not in _LOWERED


def cost_us(weight: int) -> float:
    """Extra time of a split product; `weight`: elements of its weight."""
    return US + 2 * US_PER_BYTE * weight


def left(share: float, total_us: float, spent_us: float) -> float:
    """The rest of a budget, as a share of the latency with split products.

    Args:
        share: Of the latency without them.
        total_us: The latency with them.
        spent_us: The part of it that split products need.
    """
    return max(0.0, (1.0 + share) * (1.0 - spent_us / total_us) - 1.0) if total_us else share
