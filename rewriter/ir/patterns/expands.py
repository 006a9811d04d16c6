"""Expands that change nothing: exporters write them beside a Reshape to the same shape."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from onnx import NodeProto

from rewriter.ir.graph import GraphView
from rewriter.ir.graph.match import produced


def repeated_expands(graph: GraphView) -> Iterator[NodeProto]:
    """The Expands to the very target of the Reshape before them, as tf2onnx writes BroadcastTo."""
    return (node for node in graph.nodes if node.op_type == "Expand" and repeats_reshape(graph, node))


def repeats_reshape(graph: GraphView, expand: NodeProto) -> bool:
    """True if the Expand's input was reshaped to the same target, none of whose constants is 0 or -1."""
    reshape = produced(graph, expand.input[0], "Reshape")
    return reshape is not None and reshape.input[1] == expand.input[1] and _is_plain(graph, expand.input[1])


def _is_plain(graph: GraphView, target: str) -> bool:
    """True if a Reshape takes all sizes of `target` as they are: it is made of sizes and positive numbers."""
    value = graph.constant(target)
    if value is not None:
        return bool(np.all(value > 0))
    node = produced(graph, target, "Concat", "Cast", "Shape", "Slice", "Gather", "Unsqueeze")
    if node is None:
        return False
    parts = node.input if node.op_type == "Concat" else node.input[:1]
    return node.op_type == "Shape" or all(_is_plain(graph, part) for part in parts)
