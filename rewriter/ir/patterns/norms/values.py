"""Tensors with equal values: copies, Casts, and results that are computed twice."""

from __future__ import annotations

from collections.abc import Iterator

from onnx import NodeProto, TensorProto

from rewriter.ir.graph import GraphEditor, attribute
from rewriter.ir.model.facts import FLOATS

_WIDTH: dict[int, int] = {
    TensorProto.BFLOAT16: 1,
    TensorProto.FLOAT16: 1,
    TensorProto.FLOAT: 2,
    TensorProto.DOUBLE: 3,
}
"""Order in which a Cast keeps every value; BF16 and FP16 hold different numbers."""


_REPEATED = frozenset({"Sub", "ReduceMean", "ReduceSum", "Div", "Mul"})
"""Operators that exporters write twice with the same operands."""


def positive(axes: tuple[int, ...] | None, rank: int | None) -> tuple[int, ...] | None:
    """Axes in order, counted from the front where the rank is known; () stands for all of them."""
    if axes is None:
        return None
    if rank is None:
        return tuple(sorted(axes))
    return tuple(sorted({a % rank for a in axes})) if axes else tuple(range(rank))


def transparent(graph: GraphEditor, node: NodeProto) -> bool:
    """True if a node hands a floating-point tensor on: Identity, or a Cast to a floating-point type."""
    if node.op_type == "Identity":
        return True
    return node.op_type == "Cast" and {graph.dtype(node.input[0]), attribute(node, "to")} <= FLOATS


def narrows(graph: GraphEditor, node: NodeProto) -> bool:
    """True if a Cast rounds."""
    if node.op_type != "Cast":
        return False
    before, after = graph.dtype(node.input[0]), attribute(node, "to")
    return before != after and _WIDTH.get(after, 0) <= _WIDTH.get(before or 0, 0)


def origins(graph: GraphEditor, tensor: str) -> Iterator[str]:
    """`tensor`, and the tensors that hold the same values before Identities and widening Casts."""
    while True:
        yield tensor
        node = graph.producer(tensor)
        if node is None or not transparent(graph, node) or narrows(graph, node):
            return
        tensor = node.input[0]


def same_value(graph: GraphEditor, left: str, right: str, depth: int = 3) -> bool:
    """True if two tensors are the same, or computed alike from the same ones.

    Exporters write a subtraction or a mean twice; `depth` is how many operators deep they may do so
    (Sub, Div, ReduceSum).
    """
    first, second = (list(origins(graph, t)) for t in (left, right))
    if set(first) & set(second):
        return True
    a, b = graph.producer(first[-1]), graph.producer(second[-1])
    if a is None or b is None or a.op_type not in _REPEATED or not depth:
        return _same_constant(graph, left, right)
    return (
        (a.op_type, a.domain, len(a.input)) == (b.op_type, b.domain, len(b.input))
        and _attributes(a) == _attributes(b)
        and all(same_value(graph, x, y, depth - 1) for x, y in zip(a.input, b.input, strict=True))
    )


def _attributes(node: NodeProto) -> list[bytes]:
    return sorted(a.SerializeToString(deterministic=True) for a in node.attribute)


def _same_constant(graph: GraphEditor, left: str, right: str) -> bool:
    a, b = graph.constant(left), graph.constant(right)
    return a is not None and b is not None and a.size <= 8 and a.shape == b.shape and bool((a == b).all())
