"""Follows the huge numbers of attention masks to the Softmax (or Attention) or wherever else they go."""

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from onnx import NodeProto, TensorProto, numpy_helper

from rewriter.ir.graph import GraphEditor, attribute, display_name, is_op, reachable
from rewriter.ir.graph.match import produced
from rewriter.ir.graph.ops import SHUFFLES, VIEWS
from rewriter.ir.model import Array
from rewriter.ir.model.tensors import FLOATS

FP16_MAX = 65504.0
"""Largest finite binary16 number (IEEE 754-2019, table 3.5); a mask constant is at least as large."""

MOVES = VIEWS - {"Split", "Concat"} | {"Trilu"}
"""Operators that only move the values of their first input into one output, or set some of them to 0."""

# a constant is seen through Identities, so that the use is found where they end
READERS = MOVES - {"Identity"} | {"Add", "Sub", "Mul", "Where", "Concat", "Cast", "Attention"}
"""Operators that a mask constant may enter."""

MASK_INPUT = 3
"""Place of the mask among the inputs of Attention, which adds it to the scores before its Softmax."""

_COMBINED = {"Add": operator.add, "Sub": operator.sub, "Mul": operator.mul}

_ANY = frozenset(range(-8, 0))  # axes of a tensor of unknown rank

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
            after = _step(graph, node, index, flow)
            if isinstance(after, _Flow):
                yield after
            else:
                ends.append(after)

    reachable([first] if isinstance(first, _Flow) else [], onward)
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
    """Properties of a mask on its way to Softmax."""

    tensor: str
    # sign, infinite, uniform: of its huge entries; uniform ones are equal
    sign: int
    infinite: bool
    uniform: bool
    # axes, counted from the end, along which each line has an open entry, or data may leave one. Along others
    # it may shift whole lines
    along: frozenset[int]
    summed: bool = False  # something was added to the masked entries


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
    uniform = np.unique(wide[huge]).size == 1
    return _Flow(tensor, signs.pop(), bool(np.isinf(wide).any()), uniform, _open_along(huge))


def _open_along(huge: Array) -> frozenset[int]:
    """Axes, counted from the end, along which no line is masked as a whole."""
    return frozenset(axis for axis in range(-huge.ndim, 0) if not huge.all(axis=axis).any())


def _readers(graph: GraphEditor, tensor: str) -> Iterator[tuple[NodeProto, int]]:
    """Consumers of a tensor's values with the index of the input; -1 if a subgraph reads it."""
    for node in graph.consumers(tensor):
        if node.op_type in {"Shape", "Size"}:
            continue
        indices = [index for index, name in enumerate(node.input) if name == tensor]
        yield from ((node, index) for index in indices or [-1])


def _step(graph: GraphEditor, node: NodeProto, index: int, flow: _Flow) -> _Flow | str:
    """The mask after one more node, or the reason why the node is an obstacle; "" at its end."""
    on = replace(flow, tensor=node.output[0])
    match node.op_type:
        case "Softmax":
            return _at_softmax(graph, node, flow)
        case "Attention" if index == MASK_INPUT and is_op(node, "Attention"):
            return _at_attention(graph, node, flow)
        case "Add" | "Sub" | "Where":
            after: _Flow | str | None = _joined(graph, node, index, flow, on)
        case "Mul" if not flow.summed:
            after = _multiplied(graph, node, index, flow, on)
        case "Concat" if not flow.summed:
            after = replace(on, along=_concatenated(graph, node, index, flow))
        case "Max" if _only_lower_bounds(graph, node, index):
            after = on
        case "Cast":
            wide = {graph.dtype(node.input[0]), TensorProto.FLOAT, TensorProto.DOUBLE}
            after = on if attribute(node, "to") in wide else f"{display_name(node)} narrows its type"
        case op if index == 0 and op in MOVES:
            after = replace(on, along=_moved(graph, node, flow.along))
        case _:
            after = None
    return after or f"it reaches {display_name(node)}, not only Softmax"


def _joined(graph: GraphEditor, node: NodeProto, index: int, flow: _Flow, on: _Flow) -> _Flow | None:
    """The mask after an Add, a Sub or a Where."""
    if node.op_type == "Where":
        chosen = _selected_along(graph, node.input[0], lambda condition: condition != (index == 2))
        return replace(on, along=flow.along | chosen) if index > 0 else None
    if node.input[0] == node.input[1]:
        return None
    subtracted = node.op_type == "Sub" and index == 1
    return replace(on, summed=True, sign=-flow.sign if subtracted else flow.sign)


def _multiplied(graph: GraphEditor, node: NodeProto, index: int, flow: _Flow, on: _Flow) -> _Flow | str:
    other = node.input[1 - index]
    bounds = _integers(graph, other)
    if bounds is None:
        return f"{other} may hold other values than 0 and 1"
    if flow.infinite:
        return f"0 * inf in {display_name(node)} is NaN already"
    if bounds[0] < 0 < bounds[1] or max(-bounds[0], bounds[1]) > 1:
        return f"{other} may lie in {bounds[0]:.4g} to {bounds[1]:.4g}"
    along = flow.along | _selected_along(graph, other, lambda factor: factor != 0)
    return replace(on, along=along, sign=flow.sign if bounds[1] > 0 else -flow.sign)


def _selected_along(graph: GraphEditor, tensor: str, masks: Callable[[Array], Array]) -> frozenset[int]:
    """Axes along which a condition or factor leaves entries open, or may: it is data and has several."""
    value, shape = graph.constant(tensor), graph.shape(tensor)
    if value is not None:
        return _open_along(np.asarray(masks(value)))
    return _ANY if shape is None else frozenset(a - len(shape) for a, size in enumerate(shape) if size != 1)


def _concatenated(graph: GraphEditor, node: NodeProto, index: int, flow: _Flow) -> frozenset[int]:
    """Other parts are open, unless they are constants that are huge, too."""
    rank, axis = graph.rank(node.output[0]), attribute(node, "axis")
    others = [graph.constant(name) for at, name in enumerate(node.input) if at != index]
    closed = all(v is not None and bool((np.abs(widened(v)) >= FP16_MAX).any()) for v in others)
    return flow.along if closed or rank is None else flow.along | {axis % rank - rank}


def _moved(graph: GraphEditor, node: NodeProto, along: frozenset[int]) -> frozenset[int]:
    """The axes with open entries after one of `MOVES`; those that cannot be followed are left out."""
    before, after = graph.shape(node.input[0]), graph.shape(node.output[0])
    if node.op_type in {"Identity", "Expand", "Tile"}:
        return along
    if node.op_type == "Trilu":
        return along | _beside_the_diagonal(graph, node)
    if node.op_type == "Slice" and any(graph.constant(name) is None for name in node.input[1:3]):
        return along  # of a table of all positions: each line of it keeps its own
    if before is None or after is None or node.op_type in SHUFFLES:
        return frozenset()
    if node.op_type == "Slice":
        return frozenset(axis for axis in along if before[axis] == after[axis] is not None)
    if node.op_type == "Transpose":
        rank = len(before)
        order = attribute(node, "perm") or range(rank)[::-1]
        return frozenset(axis - rank for axis, source in enumerate(order) if source - rank in along)
    if node.op_type == "Gather":
        axis = (attribute(node, "axis") or 0) % len(before) - len(before)
        more = len(after) - len(before)
        return frozenset(a if a > axis else a - more for a in along if a != axis)
    # axes of equal sizes at either end are the same; one that is merged has the lines of all its parts
    old, new = ([a - len(s) for a, size in enumerate(s) if size != 1] for s in (before, after))
    pairs = []
    for end in (-1, 0):
        while old and new and before[old[end]] == after[new[end]] is not None:
            pairs.append((old.pop(end), new.pop(end)))
    merged = {new[0]} if len(new) == 1 and along & set(old) else set()
    return frozenset({b for a, b in pairs if a in along} | merged)


def _beside_the_diagonal(graph: GraphEditor, trilu: NodeProto) -> frozenset[int]:
    """Axes of a square matrix along which a Trilu leaves a 0 in each line: it removes the diagonal, too."""
    shift = graph.scalar(trilu.input[1]) if len(trilu.input) > 1 and trilu.input[1] else 0
    shape = graph.shape(trilu.input[0])
    if shift is None or shape is None or shape[-1] != shape[-2]:
        return frozenset()
    removed = shift > 0 if attribute(trilu, "upper") in (None, 1) else shift < 0
    return frozenset({-1, -2}) if removed else frozenset()


def _integers(graph: GraphEditor, tensor: str, depth: int = 16) -> tuple[float, float] | None:
    """Bounds of a tensor that holds integers only, 0 to 1 for unknown ones; None if it may hold others."""
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
        return f"at {display_name(softmax)} it is positive"
    if (flow.summed or flow.infinite or not flow.uniform) and not flow.along & _row(graph, softmax):
        return f"it masks whole rows of {display_name(softmax)}"
    guards = [n for n in graph.consumers(softmax.output[0]) if n.op_type == "IsNaN"]
    if guards and flow.infinite:
        return f"{display_name(guards[0])} checks for the NaN of a fully masked row"
    return ""


def _at_attention(graph: GraphEditor, node: NodeProto, flow: _Flow) -> str:
    """The same for the mask of an Attention, whose rows are the last axis."""
    scores = node.output[3:4]
    if attribute(node, "softcap", 0.0) or any(scores):
        return f"{display_name(node)} " + ("outputs its scores" if any(scores) else "caps its scores")
    along = frozenset[int]() if attribute(node, "is_causal", 0) else flow.along
    return _at_softmax(graph, node, replace(flow, summed=True, along=along))


def _row(graph: GraphEditor, softmax: NodeProto) -> set[int]:
    """The axes of a row, counted from the end: before opset 13, all from `axis` on are one."""
    if softmax.op_type == "Attention":
        return {-1}
    flattens, rank = graph.model.opset < 13, graph.rank(softmax.input[0])
    axis = attribute(softmax, "axis")
    axis = (1 if flattens else -1) if axis is None else axis
    if axis >= 0 and rank is None:
        return set()
    axis = axis - rank if axis >= 0 and rank is not None else axis
    return set(range(axis, 0)) if flattens else {axis}


def _only_lower_bounds(graph: GraphEditor, node: NodeProto, index: int) -> bool:
    """True if a Max compares with nothing but constants that no score falls below."""
    others = [graph.scalar(name) for i, name in enumerate(node.input) if i != index]
    return bool(others) and all(value is not None and value <= -FP16_MAX for value in others)
