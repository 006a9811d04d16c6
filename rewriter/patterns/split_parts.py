"""Recognises the nodes of a split product by the tag of the pass split-products."""

from __future__ import annotations

from onnx import NodeProto

from rewriter.graph import made_by

PASS = "split-products"

RULE = "split"
"""Rule of the nodes of a split product that a plan keeps in FP32."""

REASON = "a part of a split product: FP16 cannot hold its parts and their sums"

_LOWERED = frozenset({"MatMul", "Reshape"})
"""The pass makes these in FP16: the product and the view before it, so that a Cast stands before both."""


def is_made(node: NodeProto) -> bool:
    """True if the pass made the node."""
    return made_by(node, (PASS,))


def is_part(node: NodeProto) -> bool:
    """True for a node of a split product that must be FP32 to be of any use."""
    return is_made(node) and node.op_type not in _LOWERED
