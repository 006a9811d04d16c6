"""Finds the products with a constant weight, and the rows that each weight is multiplied by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from onnx import NodeProto, TensorProto

from rewriter.emulation.product_kernels import operands_of
from rewriter.graph import GraphEditor, attribute, is_op, label
from rewriter.graph.match import optional_input
from rewriter.graph.new_weights import is_transposed
from rewriter.model import Array
from rewriter.patterns.windows import pads_of, windows_of

PRODUCTS = {"MatMul": (0, 1), "Gemm": (0, 1), "Conv": (1,)}
"""Inputs of an operator that may be the weight."""

Types = Callable[[NodeProto], int | None]
"""Returns the TensorProto type that a node computes in; None if its weights stay unchanged."""


@dataclass(frozen=True)
class Window:
    """Window of a Conv, with one entry per spatial axis; `pads` as in ONNX."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[int, ...]
    groups: int


@dataclass(frozen=True)
class RowSource:
    """Where the rows come from that weights are multiplied by; weights with equal sources share rows.

    Attributes:
        tensor: The computed operand.
        width: Elements in a row, of all groups together.
        window: Window of a Conv; None if the rows are vectors of the tensor.
        swapped: The tensor's rank if the channels are its second-last axis, else 0.
    """

    tensor: str
    width: int
    window: Window | None = None
    swapped: int = 0


@dataclass(frozen=True)
class Layer:
    """A weight with its consumers, and its layout as a matrix.

    Attributes:
        weight: Name of an FP32 initializer.
        node: Label of its first consumer.
        transposed: True if the weight is [N, K] instead of [K, N].
        groups: Groups of a Conv; 0 for other products.
        bias: Name of the FP32 initializer added to each row of the result and used nowhere else, or "".
        dtype: TensorProto type that the consumers compute in: the grid.
    """

    weight: str
    node: str
    sources: tuple[RowSource, ...]
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
        """The inverse of `matrix`."""
        if self.groups:
            return matrix.transpose(0, 2, 1).reshape(shape)
        own: Array = matrix[0]
        return own.T if self.transposed else own


@dataclass(frozen=True)
class Skipped:
    """A node whose weight stays unchanged, and why."""

    node: str
    reason: str


def layers(graph: GraphEditor, types: Types) -> Iterator[Layer | Skipped]:
    """Every constant FP32 weight of MatMul, Gemm and Conv in one graph, once.

    Args:
        types: Type that each node computes in. In FP32, biases and weights of products that TensorRT computes
            without Tensor Cores are skipped: they are not rounded to TF32.
    """
    seen: set[str] = set()
    for node in graph.nodes:
        weight = _weight(graph, node)
        if weight is None or weight in seen or types(node) is None:
            continue
        if types(node) == TensorProto.FLOAT and _stays_exact(graph, node):
            continue
        seen.add(weight)
        yield _layer(graph, node, weight, types)


def _stays_exact(graph: GraphEditor, node: NodeProto) -> bool:
    """True if a product in FP32 takes its operands as they are."""
    left, right = (graph.shape(name) or () for name in node.input[:2])
    return operands_of(node, left, right) == "fp32"


def _weight(graph: GraphEditor, node: NodeProto) -> str | None:
    """The constant operand of a product whose other operand is computed."""
    if not is_op(node, *PRODUCTS) or len(node.input) < 2:
        return None
    if graph.dtype(node.output[0]) != TensorProto.FLOAT:
        return None
    constant = [i for i in (0, 1) if graph.constant(node.input[i]) is not None]
    found = constant[0] if len(constant) == 1 and constant[0] in PRODUCTS[node.op_type] else None
    return None if found is None else node.input[found]


def _layer(graph: GraphEditor, node: NodeProto, weight: str, types: Types) -> Layer | Skipped:
    if not graph.is_initializer(weight):
        return Skipped(label(node), "the weight is no initializer of its graph")
    if graph.is_output(weight) or any(v.name == weight for v in graph.graph.input):
        return Skipped(label(node), "the weight is a graph input or output")
    readers = graph.consumers(weight)
    dtype = types(node)
    assert dtype is not None
    if any(types(reader) != dtype for reader in readers):
        return Skipped(label(node), "a consumer of the weight computes in another type")
    if dtype == TensorProto.FLOAT and any(_stays_exact(graph, reader) for reader in readers):
        return Skipped(label(node), "a consumer of the weight computes without Tensor Cores, in FP32 itself")
    found = [_read(graph, reader, weight) for reader in readers]
    first = found[0]
    if isinstance(first, Skipped):
        return first
    sources: list[RowSource] = []
    layout = first.transposed, first.groups
    for other in found:
        if isinstance(other, Skipped) or (other.transposed, other.groups) != layout:
            return Skipped(label(node), "the consumers of the weight use it in different layouts")
        sources.extend(other.sources)
    bias = _bias(graph, readers, weight) if dtype != TensorProto.FLOAT else ""
    return replace(first, node=label(node), sources=tuple(dict.fromkeys(sources)), bias=bias, dtype=dtype)


def _bias(graph: GraphEditor, readers: Sequence[NodeProto], weight: str) -> str:
    """The bias that all consumers of a weight add and no other node reads; "" if there is none."""
    name = optional_input(readers[0], 2)
    if not name or not graph.is_initializer(name) or graph.is_output(name) or graph.is_input(name):
        return ""
    own = {id(reader) for reader in readers}
    if any(id(reader) not in own for reader in graph.consumers(name)):
        return ""
    value, shape = graph.constant(name), graph.shape(weight)
    if value is None or shape is None or not all(_adds(reader, weight, name) for reader in readers):
        return ""
    outputs = shape[0 if readers[0].op_type == "Conv" or is_transposed(readers[0]) else 1]
    return name if value.dtype == np.float32 and value.size == outputs else ""


def _adds(node: NodeProto, weight: str, bias: str) -> bool:
    """True if the node adds the unscaled bias to each row of x W."""
    if list(node.input[1:]) != [weight, bias]:
        return False
    return node.op_type == "Conv" or all(attribute(node, name, 1.0) == 1.0 for name in ("alpha", "beta"))


def _read(graph: GraphEditor, node: NodeProto, weight: str) -> Layer | Skipped:
    """The layer from the view of one consumer."""
    if _weight(graph, node) != weight or list(node.input).count(weight) != 1:
        return Skipped(label(node), "a consumer of the weight is no product with a computed operand")
    sizes = graph.value(weight).shape
    if 0 in sizes:
        return Skipped(label(node), "the weight is empty")
    if node.op_type == "Conv":
        return _convolution(graph, node)
    if len(sizes) != 2:
        return Skipped(label(node), f"the weight has {len(sizes)} axes instead of 2")
    return _matrix_product(graph, node, weight, sizes)


def _matrix_product(
    graph: GraphEditor, node: NodeProto, weight: str, sizes: tuple[int, ...]
) -> Layer | Skipped:
    """y = x W, or its transpose y^T = x^T W if the weight is the left operand."""
    left = node.input[0] == weight
    other = node.input[1 if left else 0]
    rank = graph.rank(other)
    flags = [bool(attribute(node, name, 0)) for name in ("transA", "transB")]
    own, others = (flags[0], flags[1]) if left else (flags[1], flags[0])
    transposed = own != left
    width = sizes[1 if transposed else 0]
    swapped = others != left
    if swapped and rank is None:
        return Skipped(label(node), f"the rank of {other} is unknown")
    source = RowSource(other, width, swapped=rank or 0 if swapped and rank != 1 else 0)
    return Layer(weight, label(node), (source,), transposed)


def _convolution(graph: GraphEditor, node: NodeProto) -> Layer | Skipped:
    windows = windows_of(graph, node)
    assert windows is not None  # its weight is constant
    pads, groups = pads_of(node, windows), int(attribute(node, "group", 1))
    if pads is None:
        return Skipped(label(node), "it has auto_pad, and the shape of its input is unknown")
    window = Window(windows.kernel, windows.strides, windows.dilations, pads, groups)
    source = RowSource(node.input[0], windows.channels * prod(windows.kernel), window)
    return Layer(node.input[1], label(node), (source,), groups=groups)


def by_sources(found: Sequence[Layer]) -> Mapping[tuple[RowSource, ...], list[Layer]]:
    """Groups layers that are multiplied by the same rows."""
    together: dict[tuple[RowSource, ...], list[Layer]] = {}
    for layer in found:
        together.setdefault(layer.sources, []).append(layer)
    return together
