"""Calls of onnx's C++ code on a user's graph, in a child process, with the node at which it fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from onnx import ModelProto, NodeProto

from rewriter.ir import children
from rewriter.ir.errors import ModelError, NativeError

PROBE_S = 2.0
"""Wall time, in seconds, of each call that looks for the node at fault."""

T = TypeVar("T")


def guarded(
    function: Callable[..., T], proto: ModelProto, *arguments: Any, doing: str, path: Path | None
) -> T:
    """Call a function on a proto without detached weights.

    Raises:
        ModelError: it crashed, or exceeded the limits of time and memory; names the node if it can.
    """
    try:
        return children.call(function, proto, *arguments, doing=doing)
    except NativeError as error:
        node = culprit(function, proto, *arguments)
        where = ": ".join(filter(None, (str(path) if path else "", node)))
        raise ModelError(error.what, where=where or None, hint=error.hint) from error


def culprit(function: Callable[..., Any], proto: ModelProto, *arguments: Any) -> str | None:
    """The first node of the main graph with which the function crashes or hangs; None if it is not that.

    The nodes in front of it are enough to find it, by bisection.
    """
    nodes = list(proto.graph.node)
    low, high = 0, len(nodes)  # it survives `low` nodes, and not `high`
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _survives(function, _cut(proto, middle), arguments) else (low, middle)
    if not nodes or _survives(function, _cut(proto, high), arguments):
        return None
    return _name(nodes[high - 1])


def _cut(proto: ModelProto, count: int) -> ModelProto:
    """The model with its first nodes alone."""
    cut = ModelProto()
    cut.CopyFrom(proto)
    del cut.graph.node[count:]
    return cut


def _survives(function: Callable[..., Any], proto: ModelProto, arguments: tuple[Any, ...]) -> bool:
    try:
        children.call(function, proto, *arguments, doing="a search", limit_s=PROBE_S)
    except NativeError:
        return False
    except Exception:  # an answer, if not a good one: outputs have no producer now
        return True
    return True


def _name(node: NodeProto) -> str:
    return f"node {node.name or next(filter(None, node.output), '(unnamed)')} ({node.op_type})"
