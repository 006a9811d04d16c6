"""Groups of nodes that a pattern matched, as one unit."""

from __future__ import annotations

from collections.abc import Container

from onnx import NodeProto

from rewriter.ir.graph import GraphView, label


def exposed(graph: GraphView, node: NodeProto, unit: Container[int]) -> str | None:
    """The reason why a node inside a unit has to stay; None if it may go.

    Args:
        unit: The identities of the unit's nodes.
    """
    for tensor in node.output:
        if graph.is_output(tensor):
            return f"{tensor} inside it is a graph output"
        reader = next((n for n in graph.consumers(tensor) if id(n) not in unit), None)
        if reader is not None:
            return f"{tensor} inside it is also used by {label(reader)}"
    return None
