"""The products of a graph that have a constant weight, and the rows that it is multiplied by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from onnx import NodeProto, TensorProto

from rewriter.graph import GraphEditor, attribute, is_op, label
from rewriter.graph.fusion import is_depthwise
from rewriter.model import Array

PRODUCTS = {"MatMul": (0, 1), "Gemm": (0, 1), "Conv": (1,)}
"""Which inputs of an operator may be the weight."""

Types = Callable[[NodeProto], int | None]
"""What a node computes in, of TensorProto; None if its weights are to stay as they are."""


@dataclass(frozen=True)
class Window:
    """What a Conv reads for one output position; one entry for each spatial axis, `pads` as in ONNX."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[int, ...]
    groups: int


@dataclass(frozen=True)
class Source:
    """The rows that weights are multiplied by; weights of equal sources share them.

    Attributes:
        tensor: What the node reads.
        width: Numbers in a row, those of all groups together.
        window: Of a Conv; None if the rows are the tensor's own.
        swapped: 0, or the tensor's rank if the channels are its last axis but one.
    """

    tensor: str
    width: int
    window: Window | None = None
    swapped: int = 0


@dataclass(frozen=True)
class Layer:
    """A weight, the nodes that read it, and how it is a matrix.

    Attributes:
        weight: Name of an FP32 initializer.
        node: The first node that reads it, as messages call it.
        transposed: Whether the weight is [N, K] instead of [K, N].
        groups: Of a Conv; 0 if it is none.
        bias: Name of the FP32 initializer that is added to each row of the result, and to nothing else; "" if
            there is none.
        dtype: Type of TensorProto that its nodes compute in: whose numbers the weight is rounded to.
    """

    weight: str
    node: str
    sources: tuple[Source, ...]
    transposed: bool = False
    groups: int = 0
    bias: str = ""
    dtype: int = TensorProto.FLOAT16

    def matrix(self, value: Array) -> Array:
        """The weight as [groups, K, N]: input channels by output channels."""
        if self.groups:
            split: Array = value.reshape(self.groups, value.shape[0] // self.groups, -1)
            return split.transpose(0, 2, 1)
        return np.expand_dims(value.T if self.transposed else value, 0)

    def unmatrix(self, matrix: Array, shape: Sequence[int]) -> Array:
        """What `matrix` was made of."""
        if self.groups:
            return matrix.transpose(0, 2, 1).reshape(shape)
        own: Array = matrix[0]
        return own.T if self.transposed else own


@dataclass(frozen=True)
class Left:
    """A node whose weight is left alone, and why."""

    node: str
    reason: str


def layers(graph: GraphEditor, types: Types) -> Iterator[Layer | Left]:
    """Every constant FP32 weight of MatMul, Gemm and Conv in one graph, once.

    Args:
        types: What each node computes in; None: its weights are not rounded. In FP32 those of depthwise Convs
            are not, either, and no biases: neither is rounded to TF32.
    """
    seen: set[str] = set()
    for node in graph.nodes:
        weight = _weight(graph, node)
        if weight is None or weight in seen or types(node) is None:
            continue
        if types(node) == TensorProto.FLOAT and is_depthwise(node, graph.shape(weight) or ()):
            continue
        seen.add(weight)
        yield _layer(graph, node, weight, types)


def _weight(graph: GraphEditor, node: NodeProto) -> str | None:
    """The constant operand of a product, if the other one is computed."""
    if not is_op(node, *PRODUCTS) or len(node.input) < 2:
        return None
    if graph.dtype(node.output[0]) != TensorProto.FLOAT:
        return None
    constant = [i for i in (0, 1) if graph.constant(node.input[i]) is not None]
    found = constant[0] if len(constant) == 1 and constant[0] in PRODUCTS[node.op_type] else None
    return None if found is None else node.input[found]


def _layer(graph: GraphEditor, node: NodeProto, weight: str, types: Types) -> Layer | Left:
    if not graph.is_initializer(weight):
        return Left(label(node), "the weight is no initializer of its graph (the pass simplify makes it one)")
    if graph.is_output(weight) or any(v.name == weight for v in graph.graph.input):
        return Left(label(node), "callers see the weight")
    readers = graph.consumers(weight)
    dtype = types(node)
    assert dtype is not None
    if any(types(reader) != dtype for reader in readers):
        return Left(label(node), "a node that computes in another type reads the weight, too")
    found = [_read(graph, reader, weight) for reader in readers]
    first = found[0]
    if isinstance(first, Left):
        return first
    sources: list[Source] = []
    for other in found:
        if isinstance(other, Left) or (other.transposed, other.groups) != (first.transposed, first.groups):
            return Left(label(node), "its readers read the weight in different ways")
        sources.extend(other.sources)
    bias = _bias(graph, readers, weight) if dtype != TensorProto.FLOAT else ""
    return replace(first, node=label(node), sources=tuple(dict.fromkeys(sources)), bias=bias, dtype=dtype)


def _bias(graph: GraphEditor, readers: Sequence[NodeProto], weight: str) -> str:
    """The one vector that all readers of a weight add, and nothing else reads; "" if there is none."""
    name = readers[0].input[2] if len(readers[0].input) > 2 else ""
    if not name or not graph.is_initializer(name) or graph.is_output(name) or graph.is_input(name):
        return ""
    own = {id(reader) for reader in readers}
    if any(id(reader) not in own for reader in graph.consumers(name)):
        return ""
    value, shape = graph.constant(name), graph.shape(weight)
    if value is None or shape is None or not all(_adds(reader, weight, name) for reader in readers):
        return ""
    return name if value.dtype == np.float32 and value.size == _outputs(readers[0], shape) else ""


def _adds(node: NodeProto, weight: str, bias: str) -> bool:
    """Whether it adds the bias to each row of x W, unscaled."""
    if len(node.input) < 3 or node.input[1] != weight or node.input[2] != bias:
        return False
    return node.op_type == "Conv" or all(attribute(node, name, 1.0) == 1.0 for name in ("alpha", "beta"))


def _outputs(node: NodeProto, shape: Sequence[int | str | None]) -> int | str | None:
    """Output channels of a Conv or Gemm whose second input has this shape."""
    return shape[0 if node.op_type == "Conv" or attribute(node, "transB", 0) else 1]


def _read(graph: GraphEditor, node: NodeProto, weight: str) -> Layer | Left:
    """The layer as one of its readers sees it."""
    if _weight(graph, node) != weight or list(node.input).count(weight) != 1:
        return Left(label(node), "what reads the weight is no product with something computed")
    shape = graph.shape(weight) or ()
    sizes = tuple(d for d in shape if isinstance(d, int))
    if 0 in sizes or len(sizes) != len(shape):
        return Left(label(node), "the weight is empty")
    if node.op_type == "Conv":
        return _convolution(graph, node, sizes)
    if len(sizes) != 2:
        return Left(label(node), f"the weight has {len(sizes)} axes, and 2 are handled")
    return _matrix_product(graph, node, weight, sizes)


def _matrix_product(graph: GraphEditor, node: NodeProto, weight: str, sizes: tuple[int, ...]) -> Layer | Left:
    """y = x W, or its transpose y^T = x^T W where the weight stands on the left."""
    left = node.input[0] == weight
    other = node.input[1 if left else 0]
    rank = graph.rank(other)
    flags = [bool(attribute(node, name, 0)) for name in ("transA", "transB")]
    own, others = (flags[0], flags[1]) if left else (flags[1], flags[0])
    transposed = own != left
    width = sizes[1 if transposed else 0]
    swapped = others != left
    if swapped and rank is None:
        return Left(label(node), f"the rank of {other} is not known")
    source = Source(other, width, swapped=rank or 0 if swapped and rank != 1 else 0)
    return Layer(weight, label(node), (source,), transposed)


def _convolution(graph: GraphEditor, node: NodeProto, sizes: tuple[int, ...]) -> Layer | Left:
    axes, groups = len(sizes) - 2, int(attribute(node, "group", 1))
    strides = tuple(attribute(node, "strides", (1,) * axes))
    dilations = tuple(attribute(node, "dilations", (1,) * axes))
    window = Window(sizes[2:], strides, dilations, tuple(attribute(node, "pads", (0,) * 2 * axes)), groups)
    pads = _pads(attribute(node, "auto_pad", "NOTSET"), window, graph.shape(node.input[0]))
    if pads is None:
        return Left(label(node), "auto_pad, and the shape of what is padded is not known")
    window = Window(sizes[2:], strides, dilations, pads, groups)
    source = Source(node.input[0], groups * prod(sizes[1:]), window)
    return Layer(node.input[1], label(node), (source,), groups=groups)


def _pads(mode: str, window: Window, shape: Sequence[int | str | None] | None) -> tuple[int, ...] | None:
    """Explicit pads, begins before ends; SAME splits what it needs, with the odd one where it says."""
    axes = len(window.kernel)
    if mode in ("NOTSET", "VALID", ""):
        return window.pads if mode != "VALID" else (0,) * 2 * axes
    sizes = [size for size in (shape or ())[2:] if isinstance(size, int)]
    if len(sizes) != axes:
        return None
    begins, ends = [], []
    for size, kernel, stride, dilation in zip(
        sizes, window.kernel, window.strides, window.dilations, strict=True
    ):
        span = (kernel - 1) * dilation + 1
        total = max(0, (-(-size // stride) - 1) * stride + span - size)
        small, large = total // 2, total - total // 2
        begins.append(large if mode == "SAME_LOWER" else small)
        ends.append(small if mode == "SAME_LOWER" else large)
    return (*begins, *ends)


def by_sources(found: Sequence[Layer]) -> Mapping[tuple[Source, ...], list[Layer]]:
    """Layers that are multiplied by the same rows together."""
    together: dict[tuple[Source, ...], list[Layer]] = {}
    for layer in found:
        together.setdefault(layer.sources, []).append(layer)
    return together
