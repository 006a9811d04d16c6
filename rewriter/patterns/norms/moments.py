"""Means, sums and sums of squares, as exporters write them: reductions, perhaps times constants."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from onnx import NodeProto

from rewriter.graph import GraphEditor
from rewriter.graph.ops import SCALING
from rewriter.patterns.norms.trail import Trail, same_value

MEANS = ("ReduceMean", "ReduceSum", "ReduceSumSquare")

COUNT_TOLERANCE = 1e-6
"""Relative; 1/N as an FP32 constant is off by at most 2^-24 = 6e-8, N/(N-1) by 1/N > 1e-6 up to N = 1e6."""


@dataclass(frozen=True)
class Moment:
    """A mean or sum over some axes, possibly times constants.

    Attributes:
        of: What is reduced; for a mean of squares, what is squared.
        sources: For a variance as E[x^2] - E[x]^2, where x is read; else ().
        share: The factor relative to a mean, 1.0 for a mean; None if it is not known.
        total: A plain sum.
        squared: The reduction squares by itself.
    """

    of: str
    axes: tuple[int, ...] | None
    share: float | None
    total: bool
    squared: bool = False
    sources: tuple[str, ...] = ()

    @property
    def is_mean(self) -> bool:
        return self.share is not None and math.isclose(self.share, 1.0, rel_tol=COUNT_TOLERANCE)


def squares(trail: Trail, node: NodeProto) -> Moment | None:
    """The mean (or sum) of squares that ends in `node`."""
    if node.op_type == "Sub":
        return _difference(trail, node)
    moment = reduction(trail, node)
    if moment is None or moment.squared:
        return moment
    base = _squared(trail, moment.of)
    return None if base is None else replace(moment, of=base, squared=True)


def _difference(trail: Trail, node: NodeProto) -> Moment | None:
    """E[x^2] - E[x]^2, which is the variance in exact arithmetic alone."""
    mean_square = trail.step(node.input[0], *MEANS, "Mul", "Div", views=True)
    square_mean = trail.step(node.input[1], "Mul", "Pow", views=True)
    if mean_square is None or square_mean is None:
        return None
    first = squares(trail, mean_square)
    mean = _squared(trail, square_mean.output[0])
    second = average(trail, mean) if mean else None
    if first is None or second is None or not same_value(trail.graph, first.of, second.of):
        return None
    trail.fault("the variance is E[x^2] - E[x]^2: a fused kernel would not cancel digits as it does")
    return replace(first, sources=(first.of, second.of))


def average(trail: Trail, tensor: str) -> Moment | None:
    """The mean (or sum, or multiple of it) that `tensor` holds."""
    node = trail.step(tensor, "ReduceMean", "ReduceSum", "Mul", "Div", views=True)
    return None if node is None else reduction(trail, node)


def _squared(trail: Trail, tensor: str) -> str | None:
    node = trail.step(tensor, "Pow", "Mul")
    if node is None:
        return None
    if node.op_type == "Pow":
        return node.input[0] if trail.graph.scalar(node.input[1]) == 2.0 else None
    left, right = node.input
    return left if left == right or same_value(trail.graph, left, right) else None


def reduction(trail: Trail, node: NodeProto) -> Moment | None:
    """A reduction, or one times or over scalars."""
    share: float | None = 1.0
    scaled = False
    while node.op_type in SCALING:
        factor = scaling(trail.graph, node)
        if factor is None:
            return None
        inner, value = factor
        share = None if share is None or value is None else share * value
        scaled = True
        below = trail.step(inner, *MEANS, "Mul", "Div", views=True)
        if below is None:
            return None
        node = below
    axes = trail.reduced(node)
    total = node.op_type != "ReduceMean"
    count = _count(trail.graph, node.input[0], axes) if total else 1
    share = None if share is None or count is None else share * count
    return Moment(node.input[0], axes, share, total and not scaled, node.op_type == "ReduceSumSquare")


def scaling(graph: GraphEditor, node: NodeProto) -> tuple[str, float | None] | None:
    """The tensor that a Mul or Div scales, and the factor: None if it is a scalar known at run time only."""
    pairs = [tuple(node.input)] + ([tuple(node.input)[::-1]] if node.op_type == "Mul" else [])
    for tensor, scalar in pairs:
        value = graph.scalar(scalar)
        if value:
            return tensor, 1.0 / value if node.op_type == "Div" else value
        if value is None and graph.shape(scalar) in ((), (1,)) and graph.shape(tensor) not in ((), (1,)):
            return tensor, None
    return None


def _count(graph: GraphEditor, tensor: str, axes: tuple[int, ...] | None) -> int | None:
    shape = graph.shape(tensor)
    if shape is None or axes is None:
        return None
    sizes = [shape[a] for a in axes or range(len(shape))]
    known = [s for s in sizes if isinstance(s, int)]
    return math.prod(known) if len(known) == len(sizes) else None
