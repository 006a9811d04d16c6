"""Follows the huge numbers of attention masks to the Softmax or wherever else they go."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from onnx import NodeProto, TensorProto, numpy_helper

from rewriter.ir.graph import GraphEditor, attribute, label, reached
from rewriter.ir.graph.match import produced
from rewriter.ir.graph.ops import VIEWS
from rewriter.ir.model import Array
from rewriter.ir.model.tensors import FLOATS

FP16_MAX = 65504.0
"""Largest finite binary16 number (IEEE 754-2019, table 3.5); a mask constant is at least as large."""

MOVES = VIEWS - {"Split", "Concat"} | {"Trilu"}
"""Operators that only move the values of their first input into one output, or set some of them to 0."""

# a constant is seen through Identities, so that the use is found where they end
READERS = MOVES - {"Identity"} | {"Add", "Sub", "Mul", "Where", "Concat", "Cast"}
"""Operators that a mask constant may enter."""

_COMBINED = {"Add": operator.add, "Sub": operator.sub, "Mul": operator.mul}

LARGEST_BIAS = 4096.0
"""Largest other value in a mask constant: half of what a mask of -2^14 tolerates."""


@dataclass(frozen=True)
class Use:
    """One input of one node, and the huge float constant that it reads."""

    node: NodeProto
    index: int
    value: Array

    @property
    def relies(self) -> bool:
        """True if a computed mask decides what it hides: a row may be masked as a whole."""
        return self.value.size == 1


def huge_uses(graph: GraphEditor) -> Iterator[Use]:
    """Inputs of `READERS` that are constants beyond FP16's range, in graph order."""
    for node in graph.nodes:
        for index, tensor in enumerate(node.input if node.op_type in READERS else ()):
            value = _float_constant(graph, tensor)
            # without a copy: it may be an embedding's table
            if value is not None and value.size and max(value.max(), -value.min()) >= FP16_MAX:
                yield Use(node, index, value)


def _float_constant(graph: GraphEditor, tensor: str) -> Array | None:
    """A floating-point constant, or the one element that a ConstantOfShape repeats."""
    if not tensor or graph.dtype(tensor) not in FLOATS:
        return None
    node = produced(graph, tensor, "ConstantOfShape")
    if node is None:
        return graph.constant(tensor)
    value = attribute(node, "value")
    return np.zeros(1, np.float32) if value is None else numpy_helper.to_array(value)


def obstacle(graph: GraphEditor, use: Use) -> str | None:
    """Returns why a smaller constant would change more than Softmax's zeros; None if it would not."""
    start = _start(use.node.input[use.index], use.value)
    first = start if isinstance(start, str) else _step(graph, use.node, use.index, start)
    ends = [first] if isinstance(first, str) else []

    def onward(flow: _Flow) -> Iterator[_Flow]:
        if graph.is_output(flow.tensor):
            ends.append(f"it leaves the graph as {flow.tensor}")
            return
        for node, index in _readers(graph, flow.tensor):
            softmax = node.op_type == "Softmax"
            after = _at_softmax(graph, node, flow) if softmax else _step(graph, node, index, flow)
            if isinstance(after, _Flow):
                yield after
            else:
                ends.append(after)

    reached([first] if isinstance(first, _Flow) else [], onward)
    return max(ends, key=bool, default="it reaches no Softmax") or None


def widened(value: Array) -> Array:
    """A float array in a type that holds FP16_MAX exactly."""
    return value.astype(np.float32) if value.dtype.itemsize < 4 else value


def extreme(value: Array) -> float:
    """The entry of the largest magnitude."""
    flat = value.astype(np.float64).reshape(-1)
    return float(flat[np.argmax(np.abs(flat))])


@dataclass(frozen=True)
class _Flow:
    """Properties of a mask on its way to Softmax.

    Attributes:
        sign, infinite: Of its huge entries.
        selective: It certainly leaves entries open: it is not a shift of whole rows.
        summed: Something was added to the masked entries.
    """

    tensor: str
    sign: int
    infinite: bool
    selective: bool
    summed: bool = False


def _start(tensor: str, value: Array) -> _Flow | str:
    wide = widened(value)
    huge = np.abs(wide) >= FP16_MAX
    if bool(np.isnan(wide).any()):
        return "it holds NaN"
    signs = {int(s) for s in np.sign(wide[huge])}
    if len(signs) != 1:
        return "it has both signs"
    if bool((np.abs(wide[~huge]) > LARGEST_BIAS).any()):
        return f"other values in it exceed {LARGEST_BIAS:.0f}"
    selective = wide.size > 1 and not bool(huge.all(axis=-1).any())
    return _Flow(tensor, signs.pop(), bool(np.isinf(wide).any()), selective)


def _readers(graph: GraphEditor, tensor: str) -> Iterator[tuple[NodeProto, int]]:
    """Consumers of a tensor's values with the index of the input; -1 if a subgraph reads it."""
    for node in graph.consumers(tensor):
        if node.op_type in {"Shape", "Size"}:
            continue
        indices = [index for index, name in enumerate(node.input) if name == tensor]
        yield from ((node, index) for index in indices or [-1])


def _step(graph: GraphEditor, node: NodeProto, index: int, flow: _Flow) -> _Flow | str:
    """The mask after one more node, or the reason why the node is an obstacle."""
    on = replace(flow, tensor=node.output[0])
    match node.op_type:
        case "Add" | "Sub" | "Where":
            after: _Flow | str | None = _joined(graph, node, index, flow, on)
        case "Mul" if not flow.summed:
            after = _multiplied(graph, node, index, flow, on)
        case "Concat" if not flow.summed:
            after = replace(on, selective=True)
        case "Max" if _only_lower_bounds(graph, node, index):
            after = on
        case "Cast":
            wide = {graph.dtype(node.input[0]), TensorProto.FLOAT, TensorProto.DOUBLE}
            after = on if attribute(node, "to") in wide else f"{label(node)} narrows its type"
        case op if index == 0 and op in MOVES:
            after = replace(on, selective=on.selective or op == "Trilu")
        case _:
            after = None
    return after or f"it reaches {label(node)}, not only Softmax"


def _joined(graph: GraphEditor, node: NodeProto, index: int, flow: _Flow, on: _Flow) -> _Flow | str | None:
    """The mask after an Add, a Sub or a Where."""
    if node.op_type == "Where":
        return replace(on, selective=True) if index > 0 else None
    if node.input[0] == node.input[1]:
        return None
    mask, total = graph.shape(flow.tensor), graph.shape(node.output[0])
    if mask and total and mask[-1] == 1 != total[-1]:  # one entry serves a whole row
        return f"in {label(node)} it masks whole rows"
    subtracted = node.op_type == "Sub" and index == 1
    return replace(on, summed=True, sign=-flow.sign if subtracted else flow.sign)


def _multiplied(graph: GraphEditor, node: NodeProto, index: int, flow: _Flow, on: _Flow) -> _Flow | str:
    other = node.input[1 - index]
    bounds = _integers(graph, other)
    if bounds is None:
        return f"{other} may hold other values than 0 and 1"
    if flow.infinite:
        return f"0 * inf in {label(node)} is NaN as it stands"
    if bounds[0] < 0 < bounds[1] or max(-bounds[0], bounds[1]) > 1:
        return f"{other} may lie in {bounds[0]:.4g} to {bounds[1]:.4g}"
    return replace(on, selective=True, sign=flow.sign if bounds[1] > 0 else -flow.sign)


def _integers(graph: GraphEditor, tensor: str, depth: int = 16) -> tuple[float, float] | None:
    """Bounds of a tensor that holds integers only; None if it may hold others.

    Integers of unknown origin are a mask: 0 or 1.
    """
    value, node = graph.constant(tensor), graph.producer(tensor)
    if value is not None:
        if not value.size or value.dtype.kind in "OSU":
            return None
        wide = value.astype(np.float64)
        return (float(wide.min()), float(wide.max())) if np.all(np.rint(wide) == wide) else None
    if graph.dtype(tensor) not in FLOATS:
        return (0.0, 1.0) if graph.dtype(tensor) is not None else None
    if node is None or depth == 0:
        return None
    if node.op_type in MOVES | {"Cast"}:
        return _integers(graph, node.input[0], depth - 1)
    if node.op_type not in _COMBINED and node.op_type != "Where":
        return None
    first, second = (_integers(graph, name, depth - 1) for name in node.input[-2:])
    if first is None or second is None:
        return None
    combine = _COMBINED.get(node.op_type)
    ends = [combine(x, y) for x in first for y in second] if combine else [*first, *second]
    return min(ends), max(ends)


def _at_softmax(graph: GraphEditor, softmax: NodeProto, flow: _Flow) -> str:
    """Returns why the mask must not change where it takes effect; "" if it may."""
    if flow.sign > 0:
        return f"at {label(softmax)} it is positive"
    if not flow.selective:
        return f"it masks whole rows of {label(softmax)}"
    guards = [n for n in graph.consumers(softmax.output[0]) if n.op_type == "IsNaN"]
    if guards and flow.infinite:
        return f"{label(guards[0])} looks for the NaN that it makes of a row masked whole"
    return ""


def _only_lower_bounds(graph: GraphEditor, node: NodeProto, index: int) -> bool:
    """True if a Max compares with nothing but constants that no score falls below."""
    others = [graph.scalar(name) for i, name in enumerate(node.input) if i != index]
    return bool(others) and all(value is not None and value <= -FP16_MAX for value in others)
