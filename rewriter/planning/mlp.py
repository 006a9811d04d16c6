"""The products of an MLP: those of FP32 data whose results go into no attention."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from onnx import NodeProto

from rewriter.graph import GraphEditor, attribute
from rewriter.graph.fusion import ELEMENTWISE, NORM_VIEWS, NORMS

_LIFTING = frozenset({"Squeeze", "Unsqueeze", "Identity"})
"""Views after which each row is still a row."""

_ARRANGING = NORM_VIEWS | {"Split", "Slice", "Concat"}


@dataclass(frozen=True)
class Source:
    """What a product reads that `mixed-precision{epilogues=true}` leaves in FP32.

    Attributes:
        tensor: What is split, or the norm of which is.
        norm: None: the tensor is elementwise behind a product.
        plain: Whether the norm's result, or that of a view that keeps the order of elements, is what is read.
    """

    tensor: str
    norm: NodeProto | None = None
    plain: bool = True


def source_of(graph: GraphEditor, tensor: str, behind: AbstractSet[str]) -> Source | None:
    """What leads to a tensor; None if it is FP16 anyway. `behind`: see `kernels.behind_products`."""
    node, read, plain = graph.producer(tensor), tensor, True
    while node is not None and node.op_type in NORM_VIEWS:
        plain = plain and node.op_type in _LIFTING
        read = node.input[0]
        node = graph.producer(read)
    if node is not None and node.op_type in NORMS:
        return Source(_lowered(graph, node.input[0]), node, plain and _is_last(graph, node))
    elementwise = read in behind and node is not None and node.op_type != "MatMul"
    return Source(tensor) if elementwise else None


def _lowered(graph: GraphEditor, tensor: str) -> str:
    """What a norm's view of one more axis reads."""
    node = graph.producer(tensor)
    return node.input[0] if node is not None and node.op_type == "Unsqueeze" else tensor


def _is_last(graph: GraphEditor, norm: NodeProto) -> bool:
    axis = attribute(norm, "axis", -1)
    rank = graph.rank(norm.input[0])
    return bool(axis == -1 or (rank is not None and axis == rank - 1))


def feeds_attention(graph: GraphEditor, node: NodeProto) -> bool:
    """Whether a product of computed tensors reads the result, as it is, arranged or elementwise."""
    stack, seen = [node.output[0]], set[str]()
    while stack:
        for reader in graph.consumers(stack.pop()):
            if reader.op_type == "MatMul" and not any(graph.constant(n) is not None for n in reader.input):
                return True
            if reader.op_type in ELEMENTWISE | _ARRANGING:
                fresh = [name for name in reader.output if name not in seen]
                seen.update(fresh)
                stack.extend(fresh)
    return False
