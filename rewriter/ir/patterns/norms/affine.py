"""The affine part after a normalisation: a factor and a summand that are its scale and bias."""

from dataclasses import dataclass, field

import numpy as np
from onnx import NodeProto

from rewriter.ir.graph import GraphEditor, display_name, is_op
from rewriter.ir.graph.match import other_operand, walk_down, walk_up
from rewriter.ir.graph.ops import RESHAPES
from rewriter.ir.model import Array
from rewriter.ir.model.tensors import Shape
from rewriter.ir.patterns.values import origins, transparent


@dataclass(frozen=True)
class NormalizedAxes:
    """The normalised axes, counted from the front if the rank is known, and the `shape` that has them."""

    numbers: tuple[int, ...]
    shape: Shape | None

    @property
    def rank(self) -> int | None:
        return None if self.shape is None else len(self.shape)

    @property
    def trailing(self) -> bool:
        count = len(self.numbers)
        last = range(-count, 0) if self.rank is None else range(self.rank - count, self.rank)
        return count > 0 and self.numbers == tuple(last)

    @property
    def sizes(self) -> tuple[int | None, ...]:
        """Sizes of the normalised axes, None where they are not known."""
        dims = [None if self.shape is None else self.shape[a] for a in self.numbers]
        return tuple(d if isinstance(d, int) else None for d in dims)

    def fits(self, shape: Shape) -> bool:
        """True if a constant of this shape varies along the normalised axes only, and adds no element."""
        if self.rank is None or self.shape is None:
            return len(shape) == len(self.numbers) and all(isinstance(d, int) and d > 1 for d in shape)
        if len(shape) > self.rank:
            return False
        whole = (1,) * (self.rank - len(shape)) + shape
        return all(
            d == 1 or (i in self.numbers and (d == size or not isinstance(size, int)))
            for i, (d, size) in enumerate(zip(whole, self.shape, strict=True))
        )


@dataclass
class Affine:
    """The affine part, or the reason against it. `views` reshape the weights."""

    output: str
    scale: str | None
    bias: str | None
    nodes: list[NodeProto] = field(default_factory=list)
    views: list[NodeProto] = field(default_factory=list)
    blocked: str | None = None


def follow(graph: GraphEditor, affine: Affine, axes: NormalizedAxes, source: str, *, biased: bool) -> None:
    """Adds the scale and the bias after the output of a formula, which may have some already.

    Args:
        source: The normalised tensor. Where it was widened, one Cast back belongs to the normalisation.
        biased: This kind of norm has a bias.
    """
    outer = {graph.dtype(name) for name in origins(graph, source)} - {graph.dtype(affine.output)}
    path, end = _idle(graph, affine.output)
    node = graph.only_consumer(end)
    if node is not None and node.op_type == "Cast" and graph.dtype(node.output[0]) in outer:
        affine.nodes += [*path, node]
        affine.output = node.output[0]
    for role, tensor in (("scale", affine.scale), ("bias", affine.bias)):
        if tensor is not None:
            affine.views += _views(graph, tensor)
            if not _fits(graph, tensor, axes):
                affine.blocked = _misfit(graph, role, tensor)
    takes_bias = biased and affine.bias is None
    if affine.scale is None and affine.bias is None:
        _take(graph, affine, "Mul", axes)
    if takes_bias and affine.blocked is None:
        _take(graph, affine, "Add", axes)


def weight(graph: GraphEditor, tensor: str) -> tuple[Array, list[NodeProto]] | None:
    """The constant of `tensor` in the shape of `tensor`, and the nodes that reshape it."""
    sizes = graph.sizes(tensor)
    path, name = walk_up(
        graph, tensor, lambda n: n.op_type in RESHAPES and graph.constant(n.output[0]) is None
    )
    value = graph.constant(name)
    if value is None or not path:
        return None if value is None else (value, path)
    fits = sizes is not None and np.prod(sizes, dtype=np.int64) == value.size
    return (value.reshape(sizes), path) if fits else None


def unrepeated(value: Array, axes: NormalizedAxes) -> Array:
    """A constant without its copies along axes that are not normalised: JAX expands a scale to all of x."""
    if axes.rank is None or value.ndim != axes.rank:
        return value
    for axis in set(range(value.ndim)) - set(axes.numbers):
        first = value.take([0], axis)
        value = first if np.array_equal(np.broadcast_to(first, value.shape), value) else value
    return value


def _idle(graph: GraphEditor, tensor: str) -> tuple[list[NodeProto], str]:
    """The chain of Identities and Casts to the same type after a tensor, and its end."""
    dtype = graph.dtype(tensor)
    return walk_down(graph, tensor, lambda n: transparent(graph, n) and graph.dtype(n.output[0]) == dtype)


def _take(graph: GraphEditor, affine: Affine, op: str, axes: NormalizedAxes) -> None:
    """Adds the Mul or Add after the affine part, or notes the reason against it."""
    path, end = _idle(graph, affine.output)
    consumers = graph.consumers(end)
    operands = [(node, other_operand(node, end)) for node in consumers if is_op(node, op)]
    for node, operand in operands:
        fits = _fits(graph, operand, axes) if operand is not None else None
        if fits and graph.only_consumer(end) is not node:
            if len(consumers) > 1 or graph.is_output(end):
                affine.blocked = f"{end} is used before and after {display_name(node)}"
        elif fits and operand is not None:
            affine.nodes += [*path, node]
            affine.views += _views(graph, operand)
            affine.output = node.output[0]
            affine.scale, affine.bias = (operand, affine.bias) if op == "Mul" else (affine.scale, operand)
        elif fits is False and op == "Mul" and len(consumers) == 1 and operand is not None:
            affine.blocked = _misfit(graph, "scale", operand)


def _views(graph: GraphEditor, operand: str) -> list[NodeProto]:
    constant = weight(graph, operand)
    return constant[1] if constant else []


def _misfit(graph: GraphEditor, role: str, tensor: str) -> str:
    shape = graph.shape(tensor)
    if shape is None:
        return f"its {role} {tensor} has an unknown shape"
    dims = ", ".join("?" if d is None else str(d) for d in shape)
    return f"its {role} {tensor} has shape [{dims}], unlike the normalised axes"


def _fits(graph: GraphEditor, operand: str, axes: NormalizedAxes) -> bool | None:
    """True if an operand has the shape of the normalised axes; None if it is a single number, or computed.

    A computed operand must have exactly that shape, and fewer axes than what it meets: one of the same rank
    may be a residual that happens to have batch size 1.
    """
    constant = weight(graph, operand)
    if constant is not None:
        single = constant[0].size == 1 and set(axes.sizes) != {1}
        return None if single else axes.fits(unrepeated(constant[0], axes).shape)
    shape, rank = graph.shape(operand), axes.rank
    exact = shape is not None and shape == axes.sizes and None not in shape
    return True if exact and axes.trailing and rank is not None and len(axes.numbers) < rank else None
