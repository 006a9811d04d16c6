"""The core of a decomposed normalisation: x, less its mean if it is centred, over a root of squares.

Matching runs backwards from the Div or Mul that normalises, so every step has one producer to look
at. What was met stays in a `Trail`; a match that fails throws its trail away.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from onnx import NodeProto

from rewriter.graph import GraphEditor, attribute, is_op
from rewriter.graph.ops import SCALING
from rewriter.patterns.norms.moments import MEANS, Moment, average, scaling, squares
from rewriter.patterns.norms.trail import Trail, same_value

Kind = Literal["layer-norm", "rms-norm", "l2-normalize"]

ROOTS = ("Sqrt", "Pow", "ReduceL2")
BOUNDS = ("Add", "Max", "Clip", "Relu")

NO_BOUND = 3e38
"""Clip's `max` where there is none: exporters below opset 11 write the largest float."""


@dataclass(frozen=True)
class Core:
    """What `match` found.

    Attributes:
        sources: The tensor that is normalised, as each part of the pattern reads it; they hold the
            same values, though Casts may give them different types. The numerator's comes first.
        output: What the normalising Div or Mul writes.
        axes: As written in the model; None if they are computed, () for all.
        epsilon: Value of the constant; 0.0 if there is none.
        scale: A factor of the numerator that is applied before the division, if there is one.
    """

    kind: Kind
    sources: tuple[str, ...]
    output: str
    axes: tuple[int, ...] | None
    epsilon: float
    scale: str | None
    trail: Trail


def match(graph: GraphEditor, node: NodeProto) -> Core | None:
    """The normalisation that ends in the Div or Mul `node`, if it is one."""
    for numerator, denominator in _operands(node):
        core = _core(Trail(graph), node, numerator, denominator)
        if core is not None:
            return core
    return None


def _operands(node: NodeProto) -> Iterator[tuple[str, str]]:
    if is_op(node, *SCALING) and len(node.input) == 2:
        yield node.input[0], node.input[1]
        if node.op_type == "Mul":
            yield node.input[1], node.input[0]


def _core(trail: Trail, node: NodeProto, numerator: str, denominator: str) -> Core | None:
    root = (denominator, 0.5) if node.op_type == "Div" else _inverted(trail, denominator)
    power = _power(trail, *root) if root else None
    if power is None:
        return None
    moment, epsilon = power
    found = _sources(trail, numerator, moment)
    if found is None or not trail.aligned(denominator, found[1][0], moment.axes):
        return None
    centred, sources, scale = found
    trail.add(node)
    kind: Kind = "layer-norm" if centred else "l2-normalize" if moment.total else "rms-norm"
    if kind != "l2-normalize" and not moment.is_mean:
        trail.fault("the squares are not divided by their number, as a mean would be")
    return Core(kind, sources, node.output[0], moment.axes, epsilon, scale, trail)


# -- the denominator ---------------------------------------------------------------------------


def _inverted(trail: Trail, tensor: str) -> tuple[str, float] | None:
    """What a factor is one over, and the exponent of the root there: -0.5 if the root itself inverts."""
    node = trail.step(tensor, "Reciprocal", "Div", "Pow", views=True)
    if node is None:
        return None
    if node.op_type == "Pow":
        return str(node.output[0]), -0.5
    if node.op_type == "Div":
        return (str(node.input[1]), 0.5) if trail.graph.scalar(node.input[0]) == 1.0 else None
    return str(node.input[0]), 0.5


def _power(trail: Trail, root: str, exponent: float) -> tuple[Moment, float] | None:
    """The sum or mean of squares under a root, and epsilon."""
    outer = _above(trail, root, *ROOTS, *SCALING)
    if outer is not None and outer[0].op_type in SCALING:
        outer = _unscaled(trail, outer)
    if outer is None:
        return None
    node, outside = outer
    if node.op_type == "ReduceL2" and exponent > 0:
        return Moment(node.input[0], trail.reduced(node), None, True, True), outside or 0.0
    written = {"Sqrt": 0.5, "Pow": trail.graph.scalar(node.input[-1])}.get(node.op_type)
    inner = _above(trail, node.input[0], *MEANS, *SCALING, "Sub") if written == exponent else None
    moment = squares(trail, inner[0]) if inner else None
    if moment is None or inner is None:
        return None
    if outside and not moment.total:
        trail.fault("its epsilon stands outside the root")
    return moment, outside or inner[1] or 0.0


def _unscaled(trail: Trail, outer: tuple[NodeProto, float | None]) -> tuple[NodeProto, float | None] | None:
    """The root that a Mul or Div by a scalar takes, with the epsilon outside of it."""
    factor = scaling(trail.graph, outer[0])
    inner = _above(trail, factor[0], *ROOTS) if factor else None
    if inner is None:
        return None
    trail.fault("its root is scaled")
    return inner[0], outer[1] or inner[1]


def _above(trail: Trail, tensor: str, *ops: str) -> tuple[NodeProto, float | None] | None:
    """The node of one of `ops` that computes `tensor`, through additions of and bounds by constants."""
    epsilon = None
    node = trail.step(tensor, *ops, *BOUNDS, views=True)
    while node is not None and node.op_type not in ops:
        bound = _bound(trail.graph, node)
        if bound is None:
            return None
        inner, value = bound
        if value:
            if node.op_type != "Add":
                trail.fault("its epsilon is a lower bound, not a summand")
            if epsilon is not None:
                trail.fault("it has more than one epsilon")
            epsilon = value
        node = trail.step(inner, *ops, *BOUNDS, views=True)
    return None if node is None else (node, epsilon)


def _bound(graph: GraphEditor, node: NodeProto) -> tuple[str, float] | None:
    """The tensor that an Add, Max, Clip or Relu keeps away from zero, and by how much."""
    if node.op_type == "Relu":
        return node.input[0], 0.0
    if node.op_type == "Clip":
        low, high = (_clip_bound(graph, node, i, name) for i, name in ((1, "min"), (2, "max")))
        unbounded = high is None or high >= NO_BOUND
        return (node.input[0], low) if low is not None and unbounded else None
    if len(node.input) != 2:
        return None
    for tensor, constant in (tuple(node.input), tuple(node.input)[::-1]):
        value = graph.scalar(constant)
        if value is not None:
            return tensor, value
    return None


def _clip_bound(graph: GraphEditor, clip: NodeProto, index: int, name: str) -> float | None:
    """A constant bound; infinity if it is computed, which no epsilon is."""
    if len(clip.input) > index and clip.input[index]:
        value = graph.scalar(clip.input[index])
        return math.inf if value is None else value
    value = attribute(clip, name)  # opset 6
    return None if value is None else float(value)


# -- the numerator -----------------------------------------------------------------------------


def _sources(trail: Trail, numerator: str, moment: Moment) -> tuple[bool, tuple[str, ...], str | None] | None:
    """Whether the pattern is centred, where it reads x (the numerator first), and a scale inside it."""
    centred, scale = _centre(trail, numerator), None
    if centred is None:
        scaled = _scaled_centre(trail, numerator)
        centred, scale = scaled or (None, None)
    if centred is None:
        plain = not moment.sources and same_value(trail.graph, numerator, moment.of)
        return (False, (numerator, moment.of), None) if plain else None
    if moment.sources:
        sources, axes = (*centred[0], *moment.sources), moment.axes
    else:
        other = _centre(trail, moment.of)
        if other is None:
            return None
        sources, axes = (*centred[0], *other[0]), other[1]
    if not all(same_value(trail.graph, sources[0], s) for s in sources):
        return None
    if not trail.same_axes(sources[0], centred[1], axes, moment.axes):
        trail.fault("its two means run over different axes")
    return True, sources, scale


def _centre(trail: Trail, tensor: str) -> tuple[tuple[str, str], tuple[int, ...] | None] | None:
    """The places where x - mean(x) reads x, and the axes of the mean."""
    inner = Trail(trail.graph)
    node = inner.step(tensor, "Sub")
    mean = average(inner, node.input[1]) if node is not None else None
    if node is None or mean is None or not same_value(trail.graph, node.input[0], mean.of):
        return None
    if not inner.aligned(node.input[1], node.input[0], mean.axes):
        return None
    if not mean.is_mean:
        inner.fault("what is subtracted is not the mean")
    trail.merge(inner)
    return (node.input[0], mean.of), mean.axes


def _scaled_centre(
    trail: Trail, tensor: str
) -> tuple[tuple[tuple[str, str], tuple[int, ...] | None], str] | None:
    """A scale times x - mean(x), for those who multiply before they divide."""
    graph = trail.graph
    node = graph.producer(tensor)
    if node is None or node.op_type != "Mul":
        return None
    for inner, scale in (tuple(node.input), tuple(node.input)[::-1]):
        centred = _centre(trail, inner)
        if centred is not None:
            trail.add(node)
            return centred, scale
    return None
