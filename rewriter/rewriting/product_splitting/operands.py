"""The operands of products that can be split: FP32 data whose product does not go into attention."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from onnx import NodeProto

from rewriter.graph import GraphEditor, attribute, reached
from rewriter.graph.match import back, produced
from rewriter.graph.ops import ELEMENTWISE, LAYOUTS, ROW_NORMS

_LIFTING = frozenset({"Squeeze", "Unsqueeze", "Identity"})
"""Views after which each row is still a row."""

_ARRANGING = LAYOUTS | {"Split", "Slice", "Concat"}


@dataclass(frozen=True)
class SplitOperand:
    """Data of a product that `mixed-precision{epilogues=true}` leaves in FP32.

    Attributes:
        tensor: The tensor to split, or the one whose norm is to be split.
        norm: The norm between; None if the tensor is computed elementwise from a product.
        plain: True if the product reads the norm's result with its elements in the same order.
    """

    tensor: str
    norm: NodeProto | None = None
    plain: bool = True


def operand_of(graph: GraphEditor, tensor: str, epilogues: AbstractSet[str]) -> SplitOperand | None:
    """The operand that a product reads as `tensor`; None if it is FP16 anyway.

    Args:
        epilogues: As `fusion.after_products` returns them.
    """
    views, read = back(graph, tensor, lambda n: n.op_type in LAYOUTS)
    node, plain = graph.producer(read), all(view.op_type in _LIFTING for view in views)
    if node is not None and node.op_type in ROW_NORMS:
        return SplitOperand(_lowered(graph, node.input[0]), node, plain and _is_last(graph, node))
    elementwise = read in epilogues and node is not None and node.op_type != "MatMul"
    return SplitOperand(tensor) if elementwise else None


def _lowered(graph: GraphEditor, tensor: str) -> str:
    """The tensor before the view of one more axis that a norm may read."""
    node = produced(graph, tensor, "Unsqueeze")
    return tensor if node is None else node.input[0]


def _is_last(graph: GraphEditor, norm: NodeProto) -> bool:
    axis = attribute(norm, "axis", -1)
    rank = graph.rank(norm.input[0])
    return bool(axis == -1 or (rank is not None and axis == rank - 1))


def feeds_attention(graph: GraphEditor, node: NodeProto) -> bool:
    """True if a product of computed tensors reads the result, as it is, rearranged or elementwise."""

    def onward(tensor: str) -> list[str]:
        passing = (n for n in graph.consumers(tensor) if n.op_type in ELEMENTWISE | _ARRANGING)
        return [name for reader in passing for name in reader.output]

    readers = (reader for tensor in reached(node.output[:1], onward) for reader in graph.consumers(tensor))
    products = (reader for reader in readers if reader.op_type == "MatMul")
    return any(all(graph.constant(name) is None for name in product.input) for product in products)
