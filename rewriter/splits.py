"""How a split product is known again: by the tag that the pass which wrote it left in its nodes."""

from __future__ import annotations

from onnx import NodeProto

from rewriter.edits import TAG

PASS = "split-products"
"""The pass that writes them."""

RULE = "split"
"""Of those of its nodes that are FP32."""

REASON = "a part of a split product: FP16 cannot hold what it takes apart or adds up"

_LOWERED = frozenset({"MatMul", "Concat"})
"""What it makes in FP16: the product, and what it reads."""


def is_made(node: NodeProto) -> bool:
    """Whether the pass made the node."""
    return any(entry.key == TAG and entry.value == PASS for entry in node.metadata_props)


def is_part(node: NodeProto) -> bool:
    """Whether it is a node of a split product that gives nothing unless it is FP32."""
    return is_made(node) and node.op_type not in _LOWERED
