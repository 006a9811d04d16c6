"""The nodes that a match has met, and what speaks against making one operator of them."""

from __future__ import annotations

from collections.abc import Iterator

from onnx import NodeProto, TensorProto

from rewriter.graph import GraphEditor, attribute, is_op
from rewriter.graph.ops import RESHAPES
from rewriter.model.facts import FLOATS

_WIDTH: dict[int, int] = {
    TensorProto.BFLOAT16: 1,
    TensorProto.FLOAT16: 1,
    TensorProto.FLOAT: 2,
    TensorProto.DOUBLE: 3,
}
"""Order in which a Cast keeps every value; BF16 and FP16 hold different numbers."""


class Trail:
    """What one attempt to match has met on its way from the output back to the input."""

    def __init__(self, graph: GraphEditor) -> None:
        self.graph = graph
        self.nodes: dict[int, NodeProto] = {}
        self.faults: list[str] = []
        self._reshaped = False

    def add(self, *nodes: NodeProto) -> None:
        self.nodes.update((id(n), n) for n in nodes)

    def fault(self, reason: str) -> None:
        if reason not in self.faults:
            self.faults.append(reason)

    def merge(self, other: Trail) -> None:
        """Take over what another trail has met."""
        self.nodes.update(other.nodes)
        for reason in other.faults:
            self.fault(reason)

    def step(self, tensor: str, *ops: str, views: bool = False) -> NodeProto | None:
        """The node that computes `tensor` if it is one of `ops`, with the Casts and Identities between.

        With `views`, operators that only change the shape are passed, too.
        """
        passed = []
        node = self.graph.producer(tensor)
        while node is not None and node.op_type not in ops and self._passes(node, views):
            passed.append(node)
            node = self.graph.producer(node.input[0])
        if not is_op(node, *ops) or self._inert(node):
            return None
        self.add(node, *passed)
        for other in passed:
            self._note(other)
        return node

    def _passes(self, node: NodeProto, views: bool) -> bool:
        return transparent(self.graph, node) or (views and node.op_type in RESHAPES | {"Expand"})

    def _inert(self, node: NodeProto) -> bool:
        """Whether a reduction reduces nothing."""
        return bool(attribute(node, "noop_with_empty_axes", 0)) and self.graph.axes(node) == ()

    def _note(self, node: NodeProto) -> None:
        self._reshaped |= node.op_type in RESHAPES - {"Identity"}
        if node.op_type == "Expand":
            self.fault("a statistic is expanded inside it")
        if narrows(self.graph, node):
            self.fault("a statistic is rounded to a narrower type inside it")

    def reduced(self, node: NodeProto) -> tuple[int, ...] | None:
        """Axes of a reduction as written; () for all, None if they are computed."""
        self._reshaped |= attribute(node, "keepdims", 1) == 0
        return self.graph.axes(node)

    def aligned(self, statistic: str, source: str, axes: tuple[int, ...] | None) -> bool:
        """Whether a reduction of `source` over `axes` meets the elements that it was made of.

        It does if the reduced axes were kept. If they were not, or come back through a Reshape,
        the shapes decide.
        """
        if not self._reshaped:
            return True
        have, want = self.graph.shape(statistic), self.graph.shape(source)
        if have is None or want is None or axes is None or len(have) != len(want):
            return False
        reduced = {a % len(want) for a in axes or range(len(want))}
        pairs = enumerate(zip(have, want, strict=True))
        return all(h == w or (h == 1 and i in reduced) for i, (h, w) in pairs)

    def same_axes(self, source: str, *axes: tuple[int, ...] | None) -> bool:
        first, *others = (positive(a, self.graph.rank(source)) for a in axes)
        return first is not None and all(other == first for other in others)


def positive(axes: tuple[int, ...] | None, rank: int | None) -> tuple[int, ...] | None:
    """Axes in order, counted from the front where the rank is known; () stands for all of them."""
    if axes is None:
        return None
    if rank is None:
        return tuple(sorted(axes))
    return tuple(sorted({a % rank for a in axes})) if axes else tuple(range(rank))


def transparent(graph: GraphEditor, node: NodeProto) -> bool:
    """Whether a node hands a floating-point tensor on: Identity, or a Cast to a floating-point type."""
    if node.op_type == "Identity":
        return True
    return node.op_type == "Cast" and {graph.dtype(node.input[0]), attribute(node, "to")} <= FLOATS


def narrows(graph: GraphEditor, node: NodeProto) -> bool:
    """Whether a Cast rounds."""
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
    """Whether two tensors are the same, or computed alike from the same ones.

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


_REPEATED = frozenset({"Sub", "ReduceMean", "ReduceSum", "Div", "Mul"})


def _same_constant(graph: GraphEditor, left: str, right: str) -> bool:
    a, b = graph.constant(left), graph.constant(right)
    return a is not None and b is not None and a.size <= 8 and a.shape == b.shape and bool((a == b).all())
