"""The few safe edits on a graph, and the questions that a pass asks of it.

A `GraphEditor` keeps producers and consumers indexed while it edits, so every question and every
edit costs the size of what it touches. Nothing reaches the model before `commit`.
"""

from __future__ import annotations

from rewriter.graph.editor import TAG, GraphEditor, made_by, open_graphs
from rewriter.graph.nodes import (
    all_names,
    attribute,
    captured,
    casts_floats,
    casts_to,
    constant_value,
    fresh_name,
    is_op,
    label,
    reads,
    without_unread,
)
from rewriter.graph.view import GraphView
from rewriter.graph.weights import constant_row, is_own, is_quantised

__all__ = [
    "TAG",
    "GraphEditor",
    "GraphView",
    "all_names",
    "attribute",
    "captured",
    "casts_floats",
    "casts_to",
    "constant_row",
    "constant_value",
    "fresh_name",
    "is_op",
    "is_own",
    "is_quantised",
    "label",
    "made_by",
    "open_graphs",
    "reads",
    "without_unread",
]
