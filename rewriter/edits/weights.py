"""What a pass asks of a weight before it writes another one in its place."""

from __future__ import annotations

from rewriter.edits.view import GraphView


def is_quantised(graph: GraphView, tensor: str) -> bool:
    """Whether `tensor` is a quantised constant, brought back to floats."""
    source = graph.producer(tensor)
    return (
        source is not None
        and source.op_type == "DequantizeLinear"
        and graph.constant(source.input[0]) is not None
    )


def is_own(graph: GraphView, tensor: str) -> bool:
    """Whether a constant is held by this graph, not by one around it."""
    source = graph.producer(tensor)
    while source is not None and source.op_type == "Identity":
        tensor = source.input[0]
        source = graph.producer(tensor)
    return source is not None or graph.is_initializer(tensor)
