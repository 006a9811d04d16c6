"""A language for formulas: patterns that are matched from a tensor back to what it is computed of.

A pattern yields every way in which it matches; a formula takes the first that fits as a whole. Ways multiply
with depth: what is reached through any number of operators, such as a mask's Softmax, is walked instead.
Identities and Casts between float types may separate two operators of a formula. Between the operators
of a statistic, so may operators that only change its shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
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

SHAPES = RESHAPES | {"Expand"}  # operators that only change the shape of a statistic

COUNT_TOLERANCE = 1e-6
"""Relative; 1/N as an FP32 constant is off by at most 2^-24 = 6e-8, N/(N-1) by 1/N > 1e-6 up to N = 1e6."""


@dataclass(frozen=True)
class Moment:
    """A mean or sum that was matched."""

    axes: tuple[int, ...] | None  # as written in the model; () for all, None if they are computed
    share: float | None  # the factor relative to a mean, 1.0 for a mean; None if it is not known
    total: bool  # True for a plain sum

    @property
    def is_mean(self) -> bool:
        return self.share is not None and math.isclose(self.share, 1.0, rel_tol=COUNT_TOLERANCE)


class Epsilon(NamedTuple):
    """A constant that keeps a tensor away from zero: inside or outside the root."""

    value: float
    side: str


class Bindings(NamedTuple):
    """The tensors, nodes and constants that a formula has matched so far.

    A named tuple: a graph of 20,000 nodes needs 200,000 of them, and frozen dataclasses cost four times more.
    """

    graph: GraphEditor
    nodes: tuple[NodeProto, ...] = ()
    # the tensors of each `var`, one for each place that reads it
    tensors: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    moments: Mapping[str, tuple[Moment, ...]] = MappingProxyType({})  # the `mean`s by name
    epsilons: tuple[Epsilon, ...] = ()
    faults: tuple[str, ...] = ()  # reasons not to replace the formula by one operator
    reshaped: bool = False  # a reduced axis was dropped, so that shapes decide what a statistic meets
    expanded: tuple[NodeProto, ...] = ()  # the Expands of statistics
    cancels: bool = False  # the variance is a difference of squares

    def fault(self, reason: str) -> Bindings:
        return self._replace(faults=(*self.faults, reason))

    def step(self, tensor: str, *ops: str, wide: bool = False) -> tuple[NodeProto, Bindings] | None:
        """The node of `ops` that computes `tensor`, and the bindings; if `wide`, only Casts come between."""
        bindings, node = self, self.graph.producer(tensor)
        while node is not None and (kind := node.op_type) not in ops:
            if (wide or kind not in SHAPES) and not transparent(self.graph, node):
                return None
            bindings = bindings._passed(node)
            node = self.graph.producer(node.input[0])
        return (node, bindings._with(node)) if is_op(node, *ops) else None

    def _with(self, node: NodeProto) -> Bindings:
        return self._replace(nodes=(*self.nodes, node))

    def _passed(self, node: NodeProto) -> Bindings:
        bindings = self._with(node)
        if node.op_type == "Expand":
            return bindings._replace(expanded=(*bindings.expanded, node))
        if narrows(self.graph, node):
            return bindings.fault("a statistic is rounded to a narrower type inside it")
        return bindings._replace(reshaped=self.reshaped or node.op_type in RESHAPES - {"Identity"})


Match = Callable[[Bindings, str], Iterator[Bindings]]


@dataclass(frozen=True)
class Pattern:
    """A part of a formula; `a | b` tries `a` first. `match` yields every way in which a tensor fits it."""

    match: Match

    def __or__(self, other: Pattern) -> Pattern:
        return Pattern(lambda found, tensor: chain(self.match(found, tensor), other.match(found, tensor)))


def var(name: str) -> Pattern:
    """Any tensor; the same values in all places of a formula."""

    def match(bindings: Bindings, tensor: str) -> Iterator[Bindings]:
        tensors = bindings.tensors.get(name, ())
        if not tensors or same_value(bindings.graph, tensors[0], tensor):
            yield bindings._replace(tensors={**bindings.tensors, name: (*tensors, tensor)})

    return Pattern(match)


def const(value: float) -> Pattern:
    """A constant with one element."""

    def match(bindings: Bindings, tensor: str) -> Iterator[Bindings]:
        if bindings.graph.scalar(tensor) == value:
            yield bindings

    return Pattern(match)


def op(name: str, *inputs: Pattern, wide: bool = False) -> Pattern:
    """An operator with its inputs, in both orders if it is commutative; `wide` as for `Bindings.step`."""

    def match(bindings: Bindings, tensor: str) -> Iterator[Bindings]:
        step = bindings.step(tensor, name, wide=wide)
        if step is not None:
            orders = operands(step[0]) if len(inputs) == 2 else iter([tuple(step[0].input)])
            for order in orders:
                yield from _each(inputs, order, step[1])

    return Pattern(match)


def _each(patterns: Sequence[Pattern], tensors: Sequence[str], bindings: Bindings) -> Iterator[Bindings]:
    if not patterns:
        yield bindings
        return
    for first in patterns[0].match(bindings, tensors[0]):
        yield from _each(patterns[1:], tensors[1:], first)


def named(name: str, of: Pattern) -> Pattern:
    """A tensor that matches `of`, and that a `var` of the same name finds again."""
    again = var(name)
    return Pattern(
        lambda found, tensor: (whole for way in of.match(found, tensor) for whole in again.match(way, tensor))
    )


def cancelling(minuend: Pattern, subtrahend: Pattern) -> Pattern:
    """The difference of two statistics of one shape, which may be mostly rounding errors."""

    def match(bindings: Bindings, tensor: str) -> Iterator[Bindings]:
        step = bindings.step(tensor, "Sub")
        if step is not None and len({bindings.graph.rank(operand) for operand in step[0].input}) == 1:
            noted = step[1]._replace(cancels=True)
            yield from _each((minuend, subtrahend), tuple(step[0].input), noted)

    return Pattern(match)


def self_product(of: Pattern, *, wide: bool) -> Pattern:
    """The product of a tensor with itself; `wide` as for `Bindings.step`."""

    def match(bindings: Bindings, tensor: str) -> Iterator[Bindings]:
        step = bindings.step(tensor, "Mul", wide=wide)
        left, right = step[0].input if step is not None else ("", "")
        if step is not None and same_value(bindings.graph, left, right):
            yield from of.match(step[1], left)

    return Pattern(match)


def mean(
    name: str,
    of: Pattern,
    ops: tuple[str, ...] = ("ReduceMean", "ReduceSum", "GlobalAveragePool"),
    *,
    scaled: bool = True,
) -> Pattern:
    """A mean, or a sum, which scalars scale if `scaled`; `Bindings.moments` has it under the `name`."""
    return Pattern(
        lambda found, tensor: _means(found, tensor, name, of, (*ops, *(SCALING if scaled else ())))
    )


def _means(bindings: Bindings, tensor: str, name: str, of: Pattern, ops: Sequence[str]) -> Iterator[Bindings]:
    share: float | None = 1.0
    scaled = False
    step = bindings.step(tensor, *ops)
    while step is not None and step[0].op_type in SCALING:
        factor = scaling(bindings.graph, step[0])
        if factor is None:
            return
        share = None if share is None or factor[1] is None else share * factor[1]
        scaled = True
        step = step[1].step(factor[0], *ops)
    if step is None:
        return
    node, bindings = step
    axes = _reduced_axes(bindings.graph, node)
    if axes == () and attribute(node, "noop_with_empty_axes", 0):
        return  # it reduces nothing
    total = node.op_type not in {"ReduceMean", "GlobalAveragePool"}
    count = _count(bindings.graph, node.input[0], axes) if total and node.op_type != "ReduceL2" else 1
    share = None if share is None or count is None or node.op_type == "ReduceL2" else share * count
    moments = (*bindings.moments.get(name, ()), Moment(axes, share, total and not scaled))
    reshaped = bindings.reshaped or attribute(node, "keepdims", 1) == 0
    bindings = bindings._replace(moments={**bindings.moments, name: moments}, reshaped=reshaped)
    yield from of.match(bindings, node.input[0])


def broadcast(moment: str, of: Pattern) -> Pattern:
    """A statistic of x that broadcasts against the elements it was reduced from.

    It does if the reduced axes were kept. If they were dropped, or come back through a Reshape, the shapes
    decide. `moment` is the name of the `mean` that it holds.
    """

    def match(bindings: Bindings, tensor: str) -> Iterator[Bindings]:
        for inner in of.match(bindings._replace(reshaped=False), tensor):
            axes = inner.moments[moment][-1].axes
            if not inner.reshaped or is_aligned(inner.graph, tensor, inner.tensors["x"][0], axes):
                yield inner._replace(reshaped=bindings.reshaped)

    return Pattern(match)


def scaled_by(of: Pattern, fault: str) -> Pattern:
    """A tensor times or over a scalar, which is a `fault`."""

    def match(bindings: Bindings, tensor: str) -> Iterator[Bindings]:
        step = bindings.step(tensor, *SCALING)
        factor = scaling(bindings.graph, step[0]) if step else None
        if step is not None and factor is not None:
            yield from of.match(step[1].fault(fault), factor[0])

    return Pattern(match)


def guarded(of: Pattern, side: Literal["inside", "outside"]) -> Pattern:
    """A tensor that constants keep away from zero: they are added to it, or bound it from below."""

    def match(bindings: Bindings, tensor: str) -> Iterator[Bindings]:
        yield from of.match(bindings, tensor)
        step = bindings.step(tensor, *BOUNDS)
        bound = _bound(bindings.graph, step[0]) if step else None
        if step is not None and bound is not None:
            yield from match(_noted(step[1], step[0], Epsilon(bound[1], side)), bound[0])

    return Pattern(match)


def _noted(bindings: Bindings, node: NodeProto, epsilon: Epsilon) -> Bindings:
    if not epsilon.value:
        return bindings
    if node.op_type != "Add":
        bindings = bindings.fault("its epsilon is a lower bound, not a summand")
    if any(other.side == epsilon.side for other in bindings.epsilons):
        bindings = bindings.fault("it has more than one epsilon")
    return bindings._replace(epsilons=(*bindings.epsilons, epsilon))


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
    """The node's axes; from axis 2 on for GlobalAveragePool, which tf2onnx writes for such a mean."""
    if node.op_type != "GlobalAveragePool":
        return graph.axes(node)
    rank = graph.rank(node.input[0])
    return None if rank is None else tuple(range(2, rank))


def _count(graph: GraphEditor, tensor: str, axes: tuple[int, ...] | None) -> int | None:
    shape = graph.shape(tensor)
    if shape is None or axes is None:
        return None
    sizes = [shape[a] for a in axes or range(len(shape))]
    fixed = [s for s in sizes if isinstance(s, int)]
    return math.prod(fixed) if len(fixed) == len(sizes) else None


def _bound(graph: GraphEditor, node: NodeProto) -> tuple[str, float] | None:
    """The tensor that an Add, Max, Clip or Relu keeps away from zero, and by how much."""
    if node.op_type == "Relu":
        return node.input[0], 0.0
    if node.op_type != "Clip":
        return with_scalar(graph, node)
    low, high = (graph.scalar(optional_input(node, index)) for index in (1, 2))
    unbounded = not optional_input(node, 2) or (high is not None and high >= NO_BOUND)
    return (node.input[0], low) if low is not None and unbounded else None
