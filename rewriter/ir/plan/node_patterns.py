"""Nodes that a user names."""

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass

from onnx import NodeProto

from rewriter.ir.graph.nodes import display_name


@dataclass(frozen=True)
class NodePatterns:
    """Nodes that the user names: those to keep in FP32, or to lower."""

    nodes: tuple[str, ...] = ()  # patterns (fnmatch) of node or output names
    ops: tuple[str, ...] = ()
    # names of nodes or outputs, each with its operator in a given plan. Passes keep the names of tensors, so
    # a name without an operator may mean the node that computed it before
    planned: frozenset[tuple[str, str]] = frozenset()

    def requests(self, node: NodeProto) -> Iterator[str]:
        """The user's requests that a node fits, in words for the command line and Python alike."""
        names = (node.name, *node.output)
        for pattern in self.nodes:
            if any(fnmatch.fnmatchcase(name, pattern) for name in names):
                yield f"your pattern {pattern!r}"
        if node.op_type in self.ops:
            yield f"your request for every {node.op_type}"
        yield from (f"the plan, as {name}" for name in names if (name, node.op_type) in self.planned)

    def reason(self, *nodes: NodeProto) -> str | None:
        """Returns why nodes stay unchanged: a request keeps one of them in FP32; None if none does."""
        for node in nodes:
            for request in self.requests(node):
                return f"{'it' if len(nodes) == 1 else display_name(node)} is kept in FP32 by {request}"
        return None
