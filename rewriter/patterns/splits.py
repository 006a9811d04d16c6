"""How a split product is known again: by the tag that the pass which wrote it left in its nodes."""

from __future__ import annotations

from onnx import NodeProto

from rewriter.graph import made_by

PASS = "split-products"
"""The pass that writes them."""

RULE = "split"
"""Of those of its nodes that are FP32."""

REASON = "a part of a split product: FP16 cannot hold what it takes apart or adds up"

US, US_PER_BYTE = 3.5, 1e-6
"""What a split product takes longer, in microseconds: for itself, and for each byte of its weight in FP16,
which is read twice over. On an H200 with TensorRT-RTX 1.6.1, means of six networks: 3.1 where weights have
0.5 MB (RT-DETR), 4.7 with 1.2 (ViT-S), 7.1 and 7.4 with 4.7 (T5, BERT); docs/accuracy.md."""

_LOWERED = frozenset({"MatMul", "Reshape"})
"""What it makes in FP16: the product, and the view before it, so that a Cast stands before both."""


def is_made(node: NodeProto) -> bool:
    """Whether the pass made the node."""
    return made_by(node, (PASS,))


def is_part(node: NodeProto) -> bool:
    """Whether it is a node of a split product that gives nothing unless it is FP32."""
    return is_made(node) and node.op_type not in _LOWERED


def cost_us(weight: int) -> float:
    """What a split product takes longer; `weight`: elements of its weight."""
    return US + 2 * US_PER_BYTE * weight


def left(share: float, total_us: float, spent_us: float) -> float:
    """What is left of a budget, as a share of the latency with split products.

    Args:
        share: Of the latency without them.
        total_us: The latency with them.
        spent_us: What of it is theirs.
    """
    return max(0.0, (1.0 + share) * (1.0 - spent_us / total_us) - 1.0) if total_us else share
