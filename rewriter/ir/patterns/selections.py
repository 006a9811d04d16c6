"""Wheres whose condition is constant: JAX writes them after a division by a count that it guards."""

from __future__ import annotations

from onnx import NodeProto

from rewriter.ir.graph import GraphView


def selected(graph: GraphView, where: NodeProto) -> int | None:
    """The index of the operand that a Where hands on, whatever the data; None if it selects or broadcasts."""
    condition = graph.constant(where.input[0])
    if condition is None or not condition.size or bool(condition.any()) != bool(condition.all()):
        return None
    chosen = 1 if condition.any() else 2
    shape = graph.shape(where.output[0])
    known = shape is not None and None not in shape
    return chosen if known and graph.shape(where.input[chosen]) == shape else None
