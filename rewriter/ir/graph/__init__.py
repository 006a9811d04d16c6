"""Safe edits of a graph, and an index of its tensors and nodes.

A `GraphEditor` keeps producers and consumers indexed while it edits, so that a look-up or edit takes no
walk over the graph. The edits of a `with` block reach the model at its end.
"""

from rewriter.ir.graph.editor import TAG, GraphEditor, made_by, open_graphs
from rewriter.ir.graph.nodes import (
    attribute,
    casts_to,
    constant_value,
    display_name,
    draws_noise,
    is_op,
    reachable,
    states,
)
from rewriter.ir.graph.view import GraphView
from rewriter.ir.graph.weights import constant_row, is_quantised
from rewriter.ir.model.graphs import captured, reads

__all__ = [
    "TAG",
    "GraphEditor",
    "GraphView",
    "attribute",
    "captured",
    "casts_to",
    "constant_row",
    "constant_value",
    "display_name",
    "draws_noise",
    "is_op",
    "is_quantised",
    "made_by",
    "open_graphs",
    "reachable",
    "reads",
    "states",
]
