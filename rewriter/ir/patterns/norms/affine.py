"""The affine part after a normalisation: a factor and a summand that are its scale and bias."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from onnx import NodeProto

from rewriter.ir.base import Refusal
from rewriter.ir.graph import GraphEditor, is_op, label
from rewriter.ir.graph.match import along, back, other_operand
from rewriter.ir.graph.ops import RESHAPES
from rewriter.ir.model import Array
from rewriter.ir.model.facts import Shape
from rewriter.ir.patterns.values import transparent

Fit = Literal["fits", "wrong shape", "computed", "scalar"]


@dataclass(frozen=True)
class Frame:
    """The normalised axes and their known sizes, which a scale has to fit.

    Attributes:
        axes: Counted from the front if `rank` is known, else as written.
        shape: Of the normalised tensor; None if its rank is not known.
    """

    axes: tuple[int, ...]
    shape: Shape | None

    @property
    def rank(self) -> int | None:
        return None if self.shape is None else len(self.shape)

    @property
    def trailing(self) -> bool:
        """True if the axes are the last ones."""
        count = len(self.axes)
        last = range(-count, 0) if self.rank is None else range(self.rank - count, self.rank)
        return count > 0 and self.axes == tuple(last)

    @property
    def sizes(self) -> tuple[int | None, ...]:
        """Sizes of the normalised axes, None where they are not known."""
        dims = [None if self.shape is None else self.shape[a] for a in self.axes]
        return tuple(d if isinstance(d, int) else None for d in dims)

    def fits(self, shape: Shape) -> bool:
        """True if a constant of this shape varies along the normalised axes only, and adds no element."""
        if self.rank is None or self.shape is None:
            return len(shape) == len(self.axes) and all(isinstance(d, int) and d > 1 for d in shape)
        if len(shape) > self.rank:
            return False
        whole = (1,) * (self.rank - len(shape)) + shape
        return all(
            d == 1 or (i in self.axes and (d == size or not isinstance(size, int)))
            for i, (d, size) in enumerate(zip(whole, self.shape, strict=True))
        )


@dataclass
class Tail:
    """The affine part, or the reason against it. `views` reshape the weights."""

    output: str
    nodes: list[NodeProto] = field(default_factory=list)
    views: list[NodeProto] = field(default_factory=list)
    scale: str | None = None
    bias: str | None = None
    blocked: str | None = None
    remark: Refusal | None = None


@dataclass(frozen=True)
class Affine:
    """The scale and bias that a formula has already, and if this kind of norm has a bias at all."""

    scale: str | None
    bias: str | None
    biased: bool


def follow(graph: GraphEditor, output: str, frame: Frame, outer: frozenset[int], known: Affine) -> Tail:
    """The scale and bias after `output`.

    Args:
        outer: Types that the normalised tensor had before it was widened; one Cast back belongs to
            the normalisation.
    """
    tail = Tail(output, scale=known.scale, bias=known.bias)
    _narrow(graph, tail, outer)
    for role, tensor in (("scale", known.scale), ("bias", known.bias)):
        if tensor is not None:
            tail.views += _views(graph, tensor)
            if _fit(graph, tensor, frame) != "fits":
                tail.blocked = _misfit(graph, role, tensor)
    if known.scale is None and known.bias is None:
        _take(graph, tail, "Mul", frame)
    if known.biased and known.bias is None and tail.blocked is None:
        _take(graph, tail, "Add", frame)
    return tail


def weight(graph: GraphEditor, tensor: str) -> tuple[Array, list[NodeProto]] | None:
    """The constant of `tensor` in the shape of `tensor`, and the nodes that reshape it."""
    sizes = graph.sizes(tensor)
    path, name = back(graph, tensor, lambda n: n.op_type in RESHAPES and graph.constant(n.output[0]) is None)
    value = graph.constant(name)
    if value is None or not path:
        return None if value is None else (value, path)
    fits = sizes is not None and np.prod(sizes, dtype=np.int64) == value.size
    return (value.reshape(sizes), path) if fits else None


def unrepeated(value: Array, frame: Frame) -> Array:
    """A constant without its copies along axes that are not normalised: JAX expands a scale to all of x."""
    if frame.rank is None or value.ndim != frame.rank:
        return value
    for axis in set(range(value.ndim)) - set(frame.axes):
        first = value.take([0], axis)
        value = first if np.array_equal(np.broadcast_to(first, value.shape), value) else value
    return value


def _narrow(graph: GraphEditor, tail: Tail, outer: frozenset[int]) -> None:
    """Adds the Cast that undoes the widening of the input."""
    path, end = _idle(graph, tail.output)
    node = graph.only_consumer(end)
    if node is not None and node.op_type == "Cast" and graph.dtype(node.output[0]) in outer:
        tail.nodes += [*path, node]
        tail.output = node.output[0]


def _idle(graph: GraphEditor, tensor: str) -> tuple[list[NodeProto], str]:
    """The chain of Identities and Casts to the same type after a tensor, and its end."""
    dtype = graph.dtype(tensor)
    return along(graph, tensor, lambda n: transparent(graph, n) and graph.dtype(n.output[0]) == dtype)


def _take(graph: GraphEditor, tail: Tail, op: str, frame: Frame) -> None:
    """Adds the Mul or Add after the tail, or notes the reason against it."""
    path, end = _idle(graph, tail.output)
    found = list(_candidates(graph, end, op, frame))
    fitting = [node for node, _, fit in found if fit == "fits"]
    node = graph.only_consumer(end)
    if node is None:
        others = len(graph.consumers(end)) - len(fitting) + graph.is_output(end)
        if fitting and others:
            tail.blocked = f"{end} is used before and after {label(fitting[0])}"
        return
    for _, operand, fit in found:
        if fit == "fits":
            tail.nodes += [*path, node]
            tail.views += _views(graph, operand)
            tail.output = node.output[0]
            tail.scale, tail.bias = (operand, tail.bias) if op == "Mul" else (tail.scale, operand)
        elif fit == "wrong shape" and op == "Mul":
            tail.blocked = _misfit(graph, "scale", operand)
        elif fit != "scalar":
            what = "computed" if fit == "computed" else f"a constant with {_text(graph.shape(operand))}"
            role = "bias" if op == "Add" else "scale"
            tail.remark = Refusal(label(node), f"stays, for {operand} is no {role}: it is {what}")


def _views(graph: GraphEditor, operand: str) -> list[NodeProto]:
    known = weight(graph, operand)
    return known[1] if known else []


def _misfit(graph: GraphEditor, role: str, tensor: str) -> str:
    return f"its {role} {tensor} has {_text(graph.shape(tensor))}"


def _text(shape: Shape | None) -> str:
    dims = ", ".join("?" if d is None else str(d) for d in shape or ())
    return f"shape [{dims}], not that of the normalised axes" if shape is not None else "an unknown shape"


def _candidates(
    graph: GraphEditor, tensor: str, op: str, frame: Frame
) -> Iterator[tuple[NodeProto, str, Fit]]:
    """The consumers of one type, with their other operand and whether it fits."""
    for node in graph.consumers(tensor):
        operand = other_operand(node, tensor) if is_op(node, op) else None
        if operand is not None:
            yield node, operand, _fit(graph, operand, frame)


def _fit(graph: GraphEditor, operand: str, frame: Frame) -> Fit:
    known = weight(graph, operand)
    if known is None:
        return "fits" if _computed_fits(graph.shape(operand), frame) else "computed"
    shape = unrepeated(known[0], frame).shape
    if known[0].size == 1 and set(frame.sizes) != {1}:
        return "scalar"
    return "fits" if frame.fits(shape) else "wrong shape"


def _computed_fits(shape: Shape | None, frame: Frame) -> bool:
    """A computed operand must have exactly the normalised shape, and fewer axes than what it meets.

    One of the same rank may be a residual that happens to have batch size 1.
    """
    if shape is None or frame.rank is None or not frame.trailing or len(shape) >= frame.rank:
        return False
    return None not in frame.sizes and shape == frame.sizes
