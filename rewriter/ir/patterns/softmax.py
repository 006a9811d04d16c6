"""Finds Softmax and LogSoftmax in small operators, as JAX writes them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from onnx import NodeProto

from rewriter.ir.graph import GraphEditor, is_op, label
from rewriter.ir.patterns.norms.language import Bindings, Broadcast, Const, Mean, Named, Op, Pattern, Var
from rewriter.ir.patterns.values import exposed, is_harmless, positive

X = Var("x")
_PEAK = Mean("peak", X, ("ReduceMax",), scaled=False)
PEAK = _PEAK | Op("Max", _PEAK, Const(-math.inf))
SHIFTED = Op("Sub", X, Broadcast("peak", PEAK), wide=True)


def total(exponentials: Pattern) -> Pattern:
    return Mean("sum", exponentials, ("ReduceSum",), scaled=False)


EXPONENTIALS = Named("e", Op("Exp", SHIFTED | X, wide=True))
SOFTMAX = Op("Div", EXPONENTIALS, Broadcast("sum", total(Var("e")))) | Op(
    "Mul", EXPONENTIALS, Broadcast("sum", Op("Reciprocal", total(Var("e"))))
)
LOG_SOFTMAX = Op(
    "Sub",
    Named("shifted", SHIFTED),
    Broadcast("sum", Op("Log", total(Op("Exp", Var("shifted"), wide=True)))),
)


@dataclass(frozen=True)
class WrittenSoftmax:
    """A Softmax or LogSoftmax that small operators compute.

    Attributes:
        op: `Softmax` or `LogSoftmax`.
        axis: Counted from the front if the rank is known, else as written; None unless it is one, and known.
        nodes: All nodes of the formula.
        blocked: Why it must not become one operator; None if it may.
    """

    op: str
    input: str
    output: str
    axis: int | None
    nodes: tuple[NodeProto, ...]
    blocked: str | None

    @property
    def name(self) -> str:
        """Its name in messages: that of its last node."""
        return label(self.nodes[0])


def find_softmax(graph: GraphEditor) -> Iterator[WrittenSoftmax]:
    """The Softmaxes of one graph in small operators, in graph order."""
    for node in graph.nodes:
        op, formula = ("LogSoftmax", LOG_SOFTMAX) if is_op(node, "Sub") else ("Softmax", SOFTMAX)
        if is_op(node, "Div", "Mul", "Sub"):
            found = next(formula.match(Bindings(graph), node.output[0]), None)
            if found is not None:
                yield _written(found, op, node)


def _written(found: Bindings, op: str, last: NodeProto) -> WrittenSoftmax:
    graph, source = found.graph, found.tensors["x"][0]
    rank = graph.rank(source)
    moments = [*found.moments.get("peak", ()), *found.moments["sum"]]
    axes = {positive(moment.axes, rank) for moment in moments}
    one = next(iter(axes)) if len(axes) == 1 else None
    unit = {id(node) for node in found.nodes}
    inner = (exposed(graph, node, unit) for node in found.nodes if last.output[0] not in node.output)
    reasons = [*found.faults, *filter(None, inner)]
    if one is None or len(one) != 1:
        reasons.append("it does not run over one axis")
    if not all(is_harmless(graph, node, source) for node in found.expanded):
        reasons.append("a statistic is expanded inside it")
    if graph.dtype(source) != graph.dtype(last.output[0]):
        reasons.append(f"{source} and {last.output[0]} have different types")
    axis = one[0] if one is not None and len(one) == 1 else None
    return WrittenSoftmax(op, source, last.output[0], axis, found.nodes, "; ".join(reasons) or None)
