"""A language for formulas: patterns that are matched from a tensor back to what it is computed of.

A pattern yields every way in which it matches; a formula takes the first that fits as a whole.
Identities and Casts between float types may separate two operators of a formula. Between the operators
of a statistic, so may operators that only change its shape.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

from onnx import NodeProto

from rewriter.ir.graph import GraphEditor, attribute, is_op
from rewriter.ir.graph.match import operands, optional_input, with_scalar
from rewriter.ir.graph.ops import RESHAPES, SCALING
from rewriter.ir.patterns.values import is_aligned, narrows, same_value, transparent

BOUNDS = ("Add", "Max", "Clip", "Relu")

NO_BOUND = 3e38
"""Clip's `max` where there is none: exporters below opset 11 write the largest float."""

COUNT_TOLERANCE = 1e-6
"""Relative; 1/N as an FP32 constant is off by at most 2^-24 = 6e-8, N/(N-1) by 1/N > 1e-6 up to N = 1e6."""


@dataclass(frozen=True)
class Moment:
    """A mean or sum that was matched.

    Attributes:
        axes: As written in the model; () for all, None if they are computed.
        share: The factor relative to a mean, 1.0 for a mean; None if it is not known.
        total: A plain sum.
    """

    axes: tuple[int, ...] | None
    share: float | None
    total: bool

    @property
    def is_mean(self) -> bool:
        return self.share is not None and math.isclose(self.share, 1.0, rel_tol=COUNT_TOLERANCE)


@dataclass(frozen=True)
class Epsilon:
    """A constant that keeps a tensor away from zero: inside or outside the root."""

    value: float
    place: str


class Bindings(NamedTuple):
    """The tensors, nodes and constants that a formula has matched so far.

    A named tuple: a graph of 20,000 nodes needs 200,000 of them, and frozen dataclasses cost four times more.

    Attributes:
        tensors: The tensors of each `Var`, one for each place that reads it.
        moments: The `Mean`s by name.
        faults: Reasons not to replace the formula by one operator.
        reshaped: A reduced axis was dropped, so that shapes decide what a statistic meets.
        expanded: The Expands of statistics.
        cancels: The variance is a difference of squares.
    """

    graph: GraphEditor
    nodes: tuple[NodeProto, ...] = ()
    tensors: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    moments: Mapping[str, tuple[Moment, ...]] = MappingProxyType({})
    epsilons: tuple[Epsilon, ...] = ()
    faults: tuple[str, ...] = ()
    reshaped: bool = False
    expanded: tuple[NodeProto, ...] = ()
    cancels: bool = False

    def fault(self, reason: str) -> Bindings:
        return self._replace(faults=(*self.faults, reason)) if reason else self

    def step(self, tensor: str, *ops: str, wide: bool = False) -> tuple[NodeProto, Bindings] | None:
        """The node that computes `tensor` if it is one of `ops`, and the bindings with it.

        Args:
            wide: The tensor is no statistic: only Casts and Identities may come between.
        """
        found, node = self, self.graph.producer(tensor)
        while node is not None and node.op_type not in ops:
            shapes = not wide and node.op_type in RESHAPES | {"Expand"}
            if not shapes and not transparent(self.graph, node):
                return None
            found = found._passed(node)
            node = self.graph.producer(node.input[0])
        return (node, found._with(node)) if is_op(node, *ops) else None

    def _with(self, node: NodeProto) -> Bindings:
        return self._replace(nodes=(*self.nodes, node))

    def _passed(self, node: NodeProto) -> Bindings:
        found = self._with(node)
        if node.op_type == "Expand":
            return found._replace(expanded=(*found.expanded, node))
        if narrows(self.graph, node):
            return found.fault("a statistic is rounded to a narrower type inside it")
        return found._replace(reshaped=self.reshaped or node.op_type in RESHAPES - {"Identity"})


class Pattern(ABC):
    """A part of a formula; `a | b` tries `a` first."""

    @abstractmethod
    def match(self, found: Bindings, tensor: str) -> Iterator[Bindings]:
        """Every way in which `tensor` is computed as the pattern says, added to what was `found`."""

    def __or__(self, other: Pattern) -> Pattern:
        return Either(self, other)


@dataclass(frozen=True)
class Either(Pattern):
    """One of two patterns."""

    first: Pattern
    second: Pattern

    def match(self, found: Bindings, tensor: str) -> Iterator[Bindings]:
        yield from self.first.match(found, tensor)
        yield from self.second.match(found, tensor)


@dataclass(frozen=True)
class Var(Pattern):
    """Any tensor; the same values in all places of a formula."""

    name: str

    def match(self, found: Bindings, tensor: str) -> Iterator[Bindings]:
        known = found.tensors.get(self.name, ())
        if not known or same_value(found.graph, known[0], tensor):
            yield found._replace(tensors={**found.tensors, self.name: (*known, tensor)})


@dataclass(frozen=True)
class Const(Pattern):
    """A constant with one element."""

    value: float

    def match(self, found: Bindings, tensor: str) -> Iterator[Bindings]:
        if found.graph.scalar(tensor) == self.value:
            yield found


class Op(Pattern):
    """An operator with its inputs, in both orders if it is commutative; `wide` as for `Bindings.step`."""

    def __init__(self, op: str, *inputs: Pattern, wide: bool = False) -> None:
        self.op = op
        self.inputs = inputs
        self.wide = wide

    def match(self, found: Bindings, tensor: str) -> Iterator[Bindings]:
        step = found.step(tensor, self.op, wide=self.wide)
        if step is not None:
            node, found = step
            orders = operands(node) if len(self.inputs) == 2 else iter([tuple(node.input)])
            for order in orders:
                yield from _each(self.inputs, order, found)


def _each(patterns: Sequence[Pattern], tensors: Sequence[str], found: Bindings) -> Iterator[Bindings]:
    if not patterns:
        yield found
        return
    for first in patterns[0].match(found, tensors[0]):
        yield from _each(patterns[1:], tensors[1:], first)


@dataclass(frozen=True)
class Named(Pattern):
    """A tensor that matches `of`, and that a `Var` of the same name finds again."""

    name: str
    of: Pattern

    def match(self, found: Bindings, tensor: str) -> Iterator[Bindings]:
        for inner in self.of.match(found, tensor):
            yield from Var(self.name).match(inner, tensor)


@dataclass(frozen=True)
class Cancelling(Pattern):
    """The difference of two statistics of one shape, of which mostly rounding errors may remain."""

    minuend: Pattern
    subtrahend: Pattern

    def match(self, found: Bindings, tensor: str) -> Iterator[Bindings]:
        step = found.step(tensor, "Sub")
        if step is None:
            return
        left, right = (found.graph.rank(operand) for operand in step[0].input)
        if left == right:
            noted = step[1]._replace(cancels=True)
            yield from _each((self.minuend, self.subtrahend), tuple(step[0].input), noted)


@dataclass(frozen=True)
class SelfProduct(Pattern):
    """The product of a tensor with itself; `wide` as for `Bindings.step`."""

    of: Pattern
    wide: bool

    def match(self, found: Bindings, tensor: str) -> Iterator[Bindings]:
        step = found.step(tensor, "Mul", wide=self.wide)
        if step is None:
            return
        left, right = step[0].input
        if same_value(found.graph, left, right):
            yield from self.of.match(step[1], left)


@dataclass(frozen=True)
class Mean(Pattern):
    """A mean, or a sum times or over scalars.

    Attributes:
        name: Under which `Bindings.moments` has it.
        of: What is reduced.
        scaled: Whether scalars may scale it.
    """

    name: str
    of: Pattern
    ops: tuple[str, ...] = ("ReduceMean", "ReduceSum", "GlobalAveragePool")
    scaled: bool = True

    def match(self, found: Bindings, tensor: str) -> Iterator[Bindings]:
        share: float | None = 1.0
        scaled = False
        step = found.step(tensor, *self.ops, *(SCALING if self.scaled else ()))
        while step is not None and step[0].op_type in SCALING:
            factor = scaling(found.graph, step[0])
            if factor is None:
                return
            share = None if share is None or factor[1] is None else share * factor[1]
            scaled = True
            step = step[1].step(factor[0], *self.ops, *SCALING)
        if step is None:
            return
        node, found = step
        axes = _reduced_axes(found.graph, node)
        if axes == () and attribute(node, "noop_with_empty_axes", 0):
            return  # it reduces nothing
        total = node.op_type not in {"ReduceMean", "GlobalAveragePool"}
        count = _count(found.graph, node.input[0], axes) if total and node.op_type != "ReduceL2" else 1
        share = None if share is None or count is None or node.op_type == "ReduceL2" else share * count
        known = (*found.moments.get(self.name, ()), Moment(axes, share, total and not scaled))
        reshaped = found.reshaped or attribute(node, "keepdims", 1) == 0
        found = found._replace(moments={**found.moments, self.name: known}, reshaped=reshaped)
        yield from self.of.match(found, node.input[0])


@dataclass(frozen=True)
class Broadcast(Pattern):
    """A statistic of x that meets the elements of x that it was made of.

    It does if the reduced axes were kept. If they were dropped, or come back through a Reshape, the shapes
    decide.

    Attributes:
        moment: Name of the `Mean` that it holds.
    """

    moment: str
    of: Pattern

    def match(self, found: Bindings, tensor: str) -> Iterator[Bindings]:
        for inner in self.of.match(found._replace(reshaped=False), tensor):
            axes = inner.moments[self.moment][-1].axes
            if not inner.reshaped or is_aligned(inner.graph, tensor, inner.tensors["x"][0], axes):
                yield inner._replace(reshaped=found.reshaped)


@dataclass(frozen=True)
class Scaled(Pattern):
    """A tensor times or over a scalar."""

    of: Pattern
    fault: str

    def match(self, found: Bindings, tensor: str) -> Iterator[Bindings]:
        step = found.step(tensor, *SCALING)
        factor = scaling(found.graph, step[0]) if step else None
        if step is not None and factor is not None:
            yield from self.of.match(step[1].fault(self.fault), factor[0])


@dataclass(frozen=True)
class Guarded(Pattern):
    """A tensor that constants keep away from zero: they are added to it, or bound it from below."""

    of: Pattern
    place: Literal["inside", "outside"]

    def match(self, found: Bindings, tensor: str) -> Iterator[Bindings]:
        yield from self.of.match(found, tensor)
        step = found.step(tensor, *BOUNDS)
        bound = _bound(found.graph, step[0]) if step else None
        if step is not None and bound is not None:
            yield from self.match(self._noted(step[1], step[0], bound[1]), bound[0])

    def _noted(self, found: Bindings, node: NodeProto, value: float) -> Bindings:
        if not value:
            return found
        if node.op_type != "Add":
            found = found.fault("its epsilon is a lower bound, not a summand")
        if any(epsilon.place == self.place for epsilon in found.epsilons):
            found = found.fault("it has more than one epsilon")
        return found._replace(epsilons=(*found.epsilons, Epsilon(value, self.place)))


def scaling(graph: GraphEditor, node: NodeProto) -> tuple[str, float | None] | None:
    """The tensor that a Mul or Div scales, and the factor: None if it is a scalar known at run time only."""
    for tensor, scalar in operands(node):
        value = graph.scalar(scalar)
        if value:
            return tensor, 1.0 / value if node.op_type == "Div" else value
        if value is None and graph.shape(scalar) in ((), (1,)) and graph.shape(tensor) not in ((), (1,)):
            return tensor, None
    return None


def _reduced_axes(graph: GraphEditor, node: NodeProto) -> tuple[int, ...] | None:
    """As written; from axis 2 on for GlobalAveragePool, which tf2onnx writes for such a mean."""
    if node.op_type != "GlobalAveragePool":
        return graph.axes(node)
    rank = graph.rank(node.input[0])
    return None if rank is None else tuple(range(2, rank))


def _count(graph: GraphEditor, tensor: str, axes: tuple[int, ...] | None) -> int | None:
    shape = graph.shape(tensor)
    if shape is None or axes is None:
        return None
    sizes = [shape[a] for a in axes or range(len(shape))]
    known = [s for s in sizes if isinstance(s, int)]
    return math.prod(known) if len(known) == len(sizes) else None


def _bound(graph: GraphEditor, node: NodeProto) -> tuple[str, float] | None:
    """The tensor that an Add, Max, Clip or Relu keeps away from zero, and by how much."""
    if node.op_type == "Relu":
        return node.input[0], 0.0
    if node.op_type != "Clip":
        return with_scalar(graph, node)
    low, high = (_clip_bound(graph, node, i, name) for i, name in ((1, "min"), (2, "max")))
    unbounded = high is None or high >= NO_BOUND
    return (node.input[0], low) if low is not None and unbounded else None


def _clip_bound(graph: GraphEditor, clip: NodeProto, index: int, name: str) -> float | None:
    """A constant bound; infinity if it is computed, which no epsilon is."""
    if tensor := optional_input(clip, index):
        value = graph.scalar(tensor)
        return math.inf if value is None else value
    value = attribute(clip, name)  # opset 6
    return None if value is None else float(value)
