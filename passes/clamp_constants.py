"""clamp-constants: the huge negative numbers of attention masks become numbers that FP16 can hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from onnx import NodeProto, TensorProto, numpy_helper

from rewriter.base import Change, Context, Event, Exactness, GraphPass, Refusal
from rewriter.edits import GraphEditor, attribute, label
from rewriter.facts import FLOATS
from rewriter.model import Array

FP16_MAX = 65504.0
"""Largest finite binary16 number (IEEE 754-2019, table 3.5); a mask constant is at least as large."""

MASK = 16384.0
"""What a mask constant becomes, see `ClampConstants`."""

LARGEST_BIAS = 4096.0
"""Largest value that may stand beside the mask in one constant: half of what `MASK` tolerates."""

MOVES = frozenset(
    {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Expand", "Slice", "Tile", "Gather", "Trilu"}
)
"""Operators that only move values, or set some of them to 0."""


@dataclass(frozen=True)
class ClampConstants(GraphPass):
    """Masks hold FLT_MAX, 1e12 or infinity; in FP16 all of them are infinite, and 0 * inf is NaN.

    A constant that reaches nothing but Softmax, through Add, Where, a mask of integers that is
    multiplied in, and what only moves values, becomes -16384 = -2^14:

    - The masked entries stay exactly 0. Softmax takes exp(x - max), and FP32's exp is 0 below
      -103.98 = ln(2^-150). So nothing changes while a row's scores differ by less than
      16384 - 104: always, if they are within +-8140, which is far beyond what a trained model has.
    - It stays finite in FP16 with any score within +-49000, and within half of FP16's range (the
      head-room of the plan) with any above -16368; two such masks may be added up.
    - It is a power of two: exact in FP16 and BF16, as are its products with 0 and 1.

    A row that is masked whole has no largest open score. With Where such a row stays uniform, as
    it was with any finite constant. With Add it was uniform (FLT_MAX absorbs every score) or NaN
    (infinity), and becomes the Softmax of the masked scores. Models do not use such rows; whether
    they occur shows in a constant mask only, and there the pass declines. For a computed mask the
    report says that it relies on this. A mask made of integers is taken to hold 0 and 1.

    Options:
        whole_rows: `accept` takes it that no row of a computed mask is masked whole; `decline`
            leaves alone every constant where this matters.
    """

    name = "clamp-constants"
    exactness = Exactness(
        0.0, "exp(x) is 0 in FP32 below -103.98, half of the smallest subnormal number 2^-149 (IEEE 754)"
    )
    before = """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[2,6,6] score, int64[2,1,6] mask) => (float[2,6,6] p)
        <float one = {1.0}, float lowest = {-3.4028235e38}> {
            open = Cast<to = 1>(mask)
            shut = Sub(one, open)
            bias = Mul(shut, lowest)
            masked = Add(score, bias)
            p = Softmax<axis = -1>(masked)
        }"""
    after = """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[2,6,6] score, int64[2,1,6] mask) => (float[2,6,6] p)
        <float one = {1.0}, float low = {-16384.0}> {
            open = Cast<to = 1>(mask)
            shut = Sub(one, open)
            bias = Mul(shut, low)
            masked = Add(score, bias)
            p = Softmax<axis = -1>(masked)
        }"""

    whole_rows: Literal["accept", "decline"] = "accept"

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        clamped: dict[str, str] = {}
        for node in graph.nodes:
            if node.op_type not in READERS:
                continue
            for index, tensor in enumerate(node.input):
                value = _float_constant(graph, tensor)
                if value is not None and _is_huge(value):
                    yield self._clamp(graph, _Use(node, index, tensor), value, clamped)

    def _clamp(self, graph: GraphEditor, use: _Use, value: Array, clamped: dict[str, str]) -> Event:
        verdict = _judge(graph, use, value)
        if isinstance(verdict, str):
            return Refusal(label(use.node), f"{_shown(value)} stays: {verdict}")
        if verdict and self.whole_rows == "decline":
            return Refusal(label(use.node), f"{_shown(value)} stays: a row may be masked whole")
        if use.tensor not in clamped:
            clamped[use.tensor] = _clamped(graph, use.tensor, value)
        new = clamped[use.tensor]
        graph.set_input(use.node, use.index, new)
        graph.sweep(use.tensor)
        note = "; relies on no row being masked whole" if verdict else ""
        return Change(label(use.node), f"{_shown(value)} became {_shown(_tamed(value))}{note}")


@dataclass(frozen=True)
class _Use:
    """One input of one node."""

    node: NodeProto
    index: int
    tensor: str


@dataclass(frozen=True)
class _Flow:
    """What is known of a mask on its way to Softmax.

    Attributes:
        sign: Of its huge entries.
        infinite: Whether they are.
        selective: It is known to leave entries open: it is not a shift of whole rows.
        open_rows: Every row is known to keep an open entry.
        summed: Something was added to the masked entries.
    """

    tensor: str
    sign: int
    infinite: bool
    selective: bool
    open_rows: bool
    summed: bool = False

    @property
    def whole_rows_matter(self) -> bool:
        return not self.open_rows and (self.summed or self.infinite)


READERS = MOVES | {"Add", "Sub", "Mul", "Where", "Concat", "Cast"}


def _judge(graph: GraphEditor, use: _Use, value: Array) -> str | bool:
    """Why a constant must stay; or else whether the result relies on no row being masked whole."""
    start = _start(use, value)
    if isinstance(start, str):
        return start
    first = _step(graph, use.node, use.index, start)
    if isinstance(first, str):
        return first
    relies: list[bool] = []
    seen, stack = {first}, [first]
    while stack:
        flow = stack.pop()
        if graph.is_output(flow.tensor):
            return f"it leaves the graph as {flow.tensor}"
        for reader, index in _readers(graph, flow.tensor):
            softmax = reader.op_type == "Softmax"
            after = (_at_softmax if softmax else _step)(graph, reader, index, flow)
            if isinstance(after, str):
                return after
            if softmax:
                relies.append(after.whole_rows_matter)
            elif after not in seen:
                seen.add(after)
                stack.append(after)
    return any(relies) if relies else "it reaches no Softmax"


def _start(use: _Use, value: Array) -> _Flow | str:
    wide = value.astype(np.float32) if value.dtype.itemsize < 4 else value
    huge = np.abs(wide) >= FP16_MAX
    if bool(np.isnan(wide).any()):
        return "it holds NaN"
    signs = {int(s) for s in np.sign(wide[huge])}
    if len(signs) != 1:
        return "it has both signs"
    if bool((np.abs(wide[~huge]) > LARGEST_BIAS).any()):
        return f"other values in it exceed {LARGEST_BIAS:.0f}"
    selective = wide.size > 1 and not bool(huge.all(axis=-1).any())
    infinite = bool(np.isinf(wide).any())
    return _Flow(use.tensor, signs.pop(), infinite, selective, open_rows=selective)


def _readers(graph: GraphEditor, tensor: str) -> Iterator[tuple[NodeProto, int]]:
    """Each input of each node that reads a tensor's values; -1 for a node whose subgraph does."""
    for node in graph.consumers(tensor):
        if node.op_type in {"Shape", "Size"}:
            continue
        found = [index for index, name in enumerate(node.input) if name == tensor]
        yield from ((node, index) for index in found or [-1])


def _step(graph: GraphEditor, node: NodeProto, index: int, flow: _Flow) -> _Flow | str:
    """The mask after one more node, or why the node is in the way."""
    on = replace(flow, tensor=node.output[0])
    if not _keeps_rows(graph, node):
        on = replace(on, open_rows=False)
    match node.op_type:
        case "Add" | "Sub" if node.input[0] != node.input[1]:
            if _spreads(graph, flow.tensor, node.output[0]):
                return f"in {label(node)} it masks whole rows"
            subtracted = node.op_type == "Sub" and index == 1
            return replace(on, summed=True, sign=-flow.sign if subtracted else flow.sign)
        case "Where" if index > 0:
            return replace(on, selective=True)
        case "Concat" if not flow.summed:
            return replace(on, selective=True)
        case "Mul" if not flow.summed:
            return _multiplied(graph, node, index, flow, on)
        case "Max" if _only_lower_bounds(graph, node, index):
            return on
        case "Cast":
            return on if _widens(graph, node) else f"{label(node)} narrows its type"
        case op if index == 0 and (op == "Identity" or op in MOVES):
            return replace(on, selective=on.selective or op == "Trilu")
    return f"it reaches {label(node)}, not only Softmax"


def _keeps_rows(graph: GraphEditor, node: NodeProto) -> bool:
    """Whether an open entry in every row (along the last axis) stays one."""
    if node.op_type == "Unsqueeze":
        axes, rank = graph.axes(node), graph.rank(node.output[0])
        return bool(axes) and rank is not None and not {-1, rank - 1} & set(axes or ())
    return node.op_type in {"Add", "Sub", "Max", "Expand", "Identity", "Cast"}


def _spreads(graph: GraphEditor, tensor: str, result: str) -> bool:
    """Whether one entry of a mask serves a whole row of the sum."""
    mask, total = graph.shape(tensor), graph.shape(result)
    return (
        bool(mask)
        and mask is not None
        and mask[-1] == 1
        and bool(total)
        and total is not None
        and total[-1] != 1
    )


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
        return _constant_integers(value)
    if graph.dtype(tensor) not in FLOATS:
        return (0.0, 1.0) if graph.dtype(tensor) is not None else None
    if node is None or depth == 0:
        return None
    if node.op_type in MOVES | {"Identity", "Cast"}:
        return _integers(graph, node.input[0], depth - 1)
    inputs = node.input[1:] if node.op_type == "Where" else node.input
    if node.op_type not in {"Add", "Sub", "Mul", "Where"}:
        return None
    bounds = [_integers(graph, name, depth - 1) for name in inputs]
    first, second = bounds
    return None if first is None or second is None else _combine(node.op_type, first, second)


def _constant_integers(value: Array) -> tuple[float, float] | None:
    if not value.size or value.dtype.kind not in "fiub" or not bool(np.all(np.rint(value) == value)):
        return None
    return float(value.min()), float(value.max())


def _combine(op: str, a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    """Bounds of the result of an operator from those of its inputs."""
    match op:
        case "Add":
            return a[0] + b[0], a[1] + b[1]
        case "Sub":
            return a[0] - b[1], a[1] - b[0]
        case "Mul":
            products = [x * y for x in a for y in b]
            return min(products), max(products)
        case _:
            return min(a[0], b[0]), max(a[1], b[1])


def _at_softmax(graph: GraphEditor, softmax: NodeProto, index: int, flow: _Flow) -> _Flow | str:
    """The mask where it takes effect, or why it must stay as it is there."""
    if flow.sign > 0:
        return f"at {label(softmax)} it is positive"
    if not flow.selective:
        return f"it masks whole rows of {label(softmax)}"
    axis, rank = attribute(softmax, "axis", -1), graph.rank(flow.tensor)
    if graph.model.opset >= 13 and axis != -1 and (rank is None or axis != rank - 1):
        flow = replace(flow, open_rows=False)  # before 13, a row holds all axes from `axis` on
    guards = [n for n in graph.consumers(softmax.output[0]) if n.op_type == "IsNaN"]
    if guards and flow.infinite and not flow.open_rows:
        return f"{label(guards[0])} looks for the NaN that it makes of a row masked whole"
    return flow


def _only_lower_bounds(graph: GraphEditor, node: NodeProto, index: int) -> bool:
    """Whether a Max compares with nothing but constants that no score falls below."""
    others = [graph.scalar(name) for i, name in enumerate(node.input) if i != index]
    return all(value is not None and value <= -FP16_MAX for value in others)


def _widens(graph: GraphEditor, cast: NodeProto) -> bool:
    to = attribute(cast, "to")
    return to == graph.dtype(cast.input[0]) or to in {TensorProto.FLOAT, TensorProto.DOUBLE}


def _float_constant(graph: GraphEditor, tensor: str) -> Array | None:
    """A floating-point constant, or the one element that a ConstantOfShape repeats."""
    if not tensor or graph.dtype(tensor) not in FLOATS:
        return None
    node = graph.producer(tensor)
    if node is not None and node.op_type == "ConstantOfShape":
        value = attribute(node, "value")
        return None if value is None else numpy_helper.to_array(value)
    return graph.constant(tensor)


def _is_huge(value: Array) -> bool:
    return bool(value.size) and bool(max(float(value.max()), -float(value.min())) >= FP16_MAX)


def _tamed(value: Array) -> Array:
    """`value` with its huge entries at +-MASK, in its own type."""
    wide = value.astype(np.float32) if value.dtype.itemsize < 4 else value
    return np.where(np.abs(wide) >= FP16_MAX, np.copysign(MASK, wide), wide).astype(value.dtype)


def _clamped(graph: GraphEditor, tensor: str, value: Array) -> str:
    """The tensor that takes the constant's place."""
    base = f"{tensor}/clamped"
    node = graph.producer(tensor)
    if node is None or node.op_type != "ConstantOfShape":
        return graph.add_constant(base, _tamed(value))
    out = graph.tensor(base, like=tensor)
    fill = numpy_helper.from_array(_tamed(value))
    graph.insert(graph.make("ConstantOfShape", node.input, [out], name=base, value=fill), before=node)
    return out


def _shown(value: Array) -> str:
    extreme = value.reshape(-1)[int(np.argmax(np.abs(value.reshape(-1).astype(np.float64))))]
    return f"{float(extreme):.4g}"
