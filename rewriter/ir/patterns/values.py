"""Tensors with equal values: copies, Casts, results that are computed twice, and what they meet."""

from collections.abc import Container, Iterator

import numpy as np
from onnx import NodeProto

from rewriter.ir.graph import GraphEditor, GraphView, attribute, display_name
from rewriter.ir.graph.match import produced
from rewriter.ir.model.schemas import embeds
from rewriter.ir.model.tensors import FLOATS

_REPEATED = frozenset({"Sub", "ReduceMean", "ReduceSum", "Div", "Mul"})
"""Operators that exporters write twice with the same operands."""


def positive(axes: tuple[int, ...] | None, rank: int | None) -> tuple[int, ...] | None:
    """Axes in order, counted from the front where the rank is known; () means all of them."""
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
    return node.op_type == "Cast" and not embeds(graph.dtype(node.input[0]) or 0, attribute(node, "to"))


def origins(graph: GraphEditor, tensor: str) -> Iterator[str]:
    """`tensor`, and the tensors that hold the same values before Identities and widening Casts."""
    while True:
        yield tensor
        node = graph.producer(tensor)
        if node is None or not transparent(graph, node) or narrows(graph, node):
            return
        tensor = node.input[0]


def same_value(graph: GraphEditor, left: str, right: str, depth: int = 3) -> bool:
    """True if two tensors are the same, or computed alike from the same ones, `depth` operators deep."""
    first, second = (list(origins(graph, t)) for t in (left, right))
    if set(first) & set(second):
        return True
    a, b = graph.producer(first[-1]), graph.producer(second[-1])
    if a is None or b is None or a.op_type not in _REPEATED or not depth:
        one, other = graph.constant(left), graph.constant(right)
        return one is not None and other is not None and one.size <= 8 and np.array_equal(one, other)
    return (
        (a.op_type, a.domain, len(a.input)) == (b.op_type, b.domain, len(b.input))
        and _attributes(a) == _attributes(b)
        and all(same_value(graph, x, y, depth - 1) for x, y in zip(a.input, b.input, strict=True))
    )


def _attributes(node: NodeProto) -> list[bytes]:
    return sorted(a.SerializeToString(deterministic=True) for a in node.attribute)


def repeats_reshape(graph: GraphView, expand: NodeProto) -> bool:
    """True if an Expand's input was reshaped to the same plain target, as tf2onnx writes BroadcastTo."""
    reshape = produced(graph, expand.input[0], "Reshape")
    return reshape is not None and reshape.input[1] == expand.input[1] and _is_plain(graph, expand.input[1])


def _is_plain(graph: GraphView, target: str) -> bool:
    """True if a Reshape uses all sizes of `target` unchanged: it consists of sizes and positive numbers."""
    value = graph.constant(target)
    if value is not None:
        return bool(np.all(value > 0))
    node = produced(graph, target, "Concat", "Cast", "Shape", "Slice", "Gather", "Unsqueeze")
    if node is None:
        return False
    parts = node.input if node.op_type == "Concat" else node.input[:1]
    return node.op_type == "Shape" or all(_is_plain(graph, part) for part in parts)


def is_aligned(graph: GraphEditor, statistic: str, tensor: str, axes: tuple[int, ...] | None) -> bool:
    """True if each element of a reshaped statistic broadcasts against the elements of `tensor` it came from.

    A Reshape keeps the number of elements, so one size may be equal though its name does not show it.
    """
    have, want = graph.shape(statistic), graph.shape(tensor)
    if have is None or want is None or axes is None or len(have) != len(want):
        return False
    reduced = {axis % len(want) for axis in axes or range(len(want))}
    pairs = [(h, w) for i, (h, w) in enumerate(zip(have, want, strict=True)) if i not in reduced]
    unequal = [(h, w) for h, w in pairs if h is None or h != w]
    if all(have[i] == 1 for i in reduced):
        return len(unequal) <= 1 and not any(isinstance(h, int) and isinstance(w, int) for h, w in unequal)
    return not unequal and all(have[i] in {1, want[i]} - {None} for i in reduced)


def is_harmless(graph: GraphEditor, expand: NodeProto, tensor: str) -> bool:
    """True if an Expand of a statistic of `tensor` leaves it at most as large as `tensor`.

    Then each element meets the same elements of `tensor` as without the Expand.
    """
    shape = produced(graph, expand.input[1], "Shape")
    own = shape is not None and not shape.attribute and same_value(graph, shape.input[0], tensor)
    if own or repeats_reshape(graph, expand):
        return True
    shapes = (graph.shape(name) for name in (expand.output[0], expand.input[0], tensor))
    after, before, whole = (shape and shape[::-1] for shape in shapes)
    if after is None or before is None or whole is None or len(after) > len(whole):
        return False
    return all(
        size == 1 or (size is not None and size in {*before[i : i + 1], whole[i]})
        for i, size in enumerate(after)
    )


def selected(graph: GraphView, where: NodeProto) -> int | None:
    """The index of the operand that a Where returns for any data; None if it selects or broadcasts."""
    condition = graph.constant(where.input[0])
    if condition is None or not condition.size or bool(condition.any()) != bool(condition.all()):
        return None
    chosen = 1 if condition.any() else 2
    shape = graph.shape(where.output[0])
    is_fixed = shape is not None and None not in shape
    return chosen if is_fixed and graph.shape(where.input[chosen]) == shape else None


def exposed(graph: GraphView, node: NodeProto, unit: Container[int]) -> str | None:
    """The reason why a node inside a unit (identities of nodes) has to stay; None if it may go."""
    for tensor in node.output:
        if graph.is_output(tensor):
            return f"{tensor} inside it is a graph output"
        reader = next((n for n in graph.consumers(tensor) if id(n) not in unit), None)
        if reader is not None:
            return f"{tensor} inside it is also used by {display_name(reader)}"
    return None
