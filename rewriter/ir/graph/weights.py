"""Conditions on a weight that a pass replaces by another one."""

from __future__ import annotations

import numpy as np

from rewriter.ir.graph.match import back, produced
from rewriter.ir.graph.view import GraphView
from rewriter.ir.model import Array


def is_quantised(graph: GraphView, tensor: str) -> bool:
    """True if `tensor` is a quantised constant, brought back to floats."""
    source = produced(graph, tensor, "DequantizeLinear")
    return source is not None and graph.constant(source.input[0]) is not None


def is_own(graph: GraphView, tensor: str) -> bool:
    """True if this graph holds the constant, not an enclosing one."""
    _, name = back(graph, tensor, lambda node: node.op_type == "Identity")
    return graph.producer(name) is not None or graph.is_initializer(name)


def constant_row(graph: GraphView, tensor: str, columns: int, rank: int | None) -> Array | None:
    """A constant that is added to every row of a product of that rank, as [columns]; None for others."""
    value = graph.constant(tensor)
    if value is None or value.size not in (1, columns) or any(size != 1 for size in value.shape[:-1]):
        return None
    if value.ndim > 1 and (rank is None or value.ndim > rank):
        return None  # it would add axes to the product
    return np.broadcast_to(value.reshape(-1), (columns,))
