"""Functions of nodes and names that need no index of the graph."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeGuard, TypeVar

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, helper, numpy_helper

from rewriter.ir.graph.ops import NOISE
from rewriter.ir.model import STANDARD_DOMAINS, Array, walk_graphs
from rewriter.ir.model.graphs import reads

T = TypeVar("T", bound=Hashable)


def is_op(node: NodeProto | None, *ops: str) -> TypeGuard[NodeProto]:
    """True if there is a node, of the standard domain, and its operator is one of `ops`."""
    return node is not None and node.op_type in ops and node.domain in STANDARD_DOMAINS


def draws_noise(node: NodeProto) -> bool:
    """True if a node draws random numbers; a Dropout may do so in training."""
    return is_op(node, *NOISE) or (is_op(node, "Dropout") and len(node.input) > 2 and bool(node.input[2]))


def reachable(start: Iterable[T], onward: Callable[[T], Iterable[T]]) -> dict[T, None]:
    """All that `onward` leads to from `start`, which is included; each once."""
    items = dict.fromkeys(start)
    stack = list(items)
    while stack:
        new = [item for item in dict.fromkeys(onward(stack.pop())) if item not in items]
        items.update(dict.fromkeys(new))
        stack.extend(new)
    return items


def without_unread(
    nodes: Sequence[NodeProto], outputs: Iterable[str], may_go: Callable[[NodeProto], bool]
) -> tuple[list[NodeProto], set[str]]:
    """The nodes, in order, without unread ones that `may_go`, and the names that they and `outputs` read."""
    read = set(outputs)
    alive: list[NodeProto] = []
    for node in reversed(nodes):
        if may_go(node) and read.isdisjoint(node.output):
            continue
        alive.append(node)
        read.update(reads(node))
    return alive[::-1], read


def attribute(node: NodeProto, name: str, default: Any = None) -> Any:
    """Value of a node's attribute as a Python object (strings as str), or `default`."""
    for item in node.attribute:
        if item.name == name:
            value = helper.get_attribute_value(item)
            return value.decode() if isinstance(value, bytes) else value
    return default


def casts_to(node: NodeProto, dtype: int) -> bool:
    return node.op_type == "Cast" and attribute(node, "to") == dtype


def constant_value(node: NodeProto) -> Array | None:
    """Value of a Constant node; None for strings."""
    for item in node.attribute:
        if item.name == "value":
            return numpy_helper.to_array(item.t)
        if item.name in ("value_float", "value_floats"):
            return np.asarray(helper.get_attribute_value(item), np.float32)
        if item.name in ("value_int", "value_ints"):
            return np.asarray(helper.get_attribute_value(item), np.int64)
    return None


def display_name(node: NodeProto) -> str:
    """The node's name in messages: its own, or its operator and first output."""
    return node.name or f"{node.op_type}({next((o for o in node.output if o), '?')})"


def all_names(graph: onnx.GraphProto) -> set[str]:
    """Every name of a tensor or node in a graph and its subgraphs."""
    names: set[str] = set()
    for scope in walk_graphs(graph):
        values = (*scope.input, *scope.output, *scope.value_info)  # value_info may hold tensors that are gone
        names.update(v.name for v in values)
        names.update(t.name for t in scope.initializer)
        for node in scope.node:
            names.add(node.name)
            names.update(node.output)
    return names


def casts_floats(node: NodeProto, is_float: Callable[[str], bool]) -> bool:
    """True if a node is a Cast from one float type to another; `is_float` knows the tensors."""
    return is_op(node, "Cast") and is_float(node.input[0]) and is_float(node.output[0])


def states(node: NodeProto, body: GraphProto) -> list[tuple[str, str]]:
    """The states of a Loop or Scan in its body, before and after an iteration; none for other nodes.

    A Loop's body has the iteration and a condition before them, and both have scan outputs after.
    """
    inputs, outputs = ([v.name for v in values] for values in (body.input, body.output))
    if node.op_type == "Loop":
        return list(zip(inputs[2:], outputs[1:], strict=False))
    scanned = attribute(node, "num_scan_inputs", 0) if node.op_type == "Scan" else len(inputs)
    return list(zip(inputs[: len(inputs) - scanned], outputs, strict=False))
