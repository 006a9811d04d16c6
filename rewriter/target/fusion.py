"""Nodes that TensorRT fuses into one kernel, as far as types and results depend on it.

A kernel begins with a product or a convolution, and includes the elementwise nodes after it. With an FP32
epilogue, a product of FP16 operands sums in FP32: see `has_fp32_epilogue`.

The same rules serve graphs without types, before a plan, which look through Casts between floats, and graphs
with types, in which Casts are nodes. `Dataflow` is their interface to both.

By its shape, a kernel computes an FP32 product exactly or in TF32, and sums an FP16 one in FP16 or FP32
(H100, TensorRT-RTX 1.6.1; docs/accuracy.md#kernels-of-products).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Literal, Protocol

import numpy as np
from onnx import NodeProto

from rewriter.ir.graph import attribute, is_op
from rewriter.ir.graph.ops import CONVOLUTIONS, ELEMENTWISE, LAYOUTS, PRODUCTS, ROW_NORMS

Test = Callable[[NodeProto], bool]


def is_depthwise(node: NodeProto, weight: Sequence[object]) -> bool:
    """True if each group of a Conv or ConvTranspose reads one channel: it does not run on Tensor Cores.

    Args:
        weight: Shape of the node's weight; () if it is unknown, which gives False.
    """
    grouped = node.op_type in CONVOLUTIONS and attribute(node, "group", 1) > 1
    if not grouped or len(weight) < 2:
        return False
    return weight[1] == 1 if node.op_type == "Conv" else weight[0] == attribute(node, "group", 1)


def is_plain_transpose(node: NodeProto) -> bool:
    """True for a dense ConvTranspose of stride 1, the kind that was measured to sum in FP32."""
    if not is_op(node, "ConvTranspose"):
        return False
    return bool(attribute(node, "group", 1) == math.prod(attribute(node, "strides", [1])) == 1)


def conv_depth(node: NodeProto, weight: Sequence[int]) -> int:
    """Number of products that one element of a Conv's result sums; for a ConvTranspose, the average.

    Args:
        weight: Shape of the node's weight; () if it is unknown, which gives 1.
    """
    if node.op_type == "Conv":
        return math.prod(weight[1:])
    read = next(iter(weight), 1) // int(attribute(node, "group", 1))
    overlap = max(1, int(math.prod(attribute(node, "strides", [1]))))
    return max(1, read * math.prod(weight[2:]) // overlap)


def rounded_reciprocal(divisor: float) -> float | None:
    """The factor of an FP16 division by a constant, if FP16 has it (docs/accuracy.md#rounded-reciprocals)."""
    with np.errstate(all="ignore"):
        factor = float(np.float16(np.float64(1.0) / divisor))
    return factor if math.isfinite(factor) and factor else None


def kernel_results(
    nodes: Iterable[NodeProto], begins: Test, belongs: Test, source: Callable[[str], str] = str
) -> dict[str, int]:
    """The tensors that kernels compute, each with the position of the node that begins its kernel.

    A node that reads several kernels' results is assigned to the last of them.

    Args:
        begins: True for a node that begins a kernel, such as a product.
        belongs: True for a node that the kernel of its operand computes, too.
        source: Returns the tensor that another one is a copy of, such as the operand of an ignored Cast.
    """
    kernels: dict[str, int] = {}
    for position, node in enumerate(nodes):
        needed = max((kernels[s] for s in map(source, node.input) if s in kernels), default=None)
        if begins(node):
            kernels.update(dict.fromkeys(filter(None, node.output), position))
        elif needed is not None and belongs(node):
            kernels.update(dict.fromkeys(filter(None, node.output), needed))
    return kernels


class Dataflow(Protocol):
    """The interface that the rules need of a graph."""

    def source(self, tensor: str) -> str:
        """The tensor that `tensor` is a copy of: in a graph without types, the one before its Casts."""
        ...

    def is_constant(self, tensor: str) -> bool: ...

    def is_output(self, tensor: str) -> bool: ...

    def readers(self, tensor: str) -> Iterable[tuple[str, NodeProto]]:
        """The nodes that compute with a tensor, each with the name under which it reads it."""
        ...


def projected(flow: Dataflow, node: NodeProto) -> str | None:
    """The tensor that a matrix product multiplies by a constant weight; None for other nodes."""
    if node.op_type not in PRODUCTS:
        return None
    computed = [flow.source(name) for name in node.input[:2] if not flow.is_constant(name)]
    return computed[0] if len(computed) == 1 else None


def multiplies_computed(flow: Dataflow, node: NodeProto) -> bool:
    """True for a MatMul of two computed tensors, such as both products of attention."""
    return node.op_type == "MatMul" and not any(map(flow.is_constant, node.input[:2]))


def stands_alone(flow: Dataflow, node: NodeProto, apart: AbstractSet[int] = frozenset()) -> bool:
    """True if the node is the only product of its data with a constant weight, but for nodes `apart`.

    TensorRT merges several (Q, K and V) of one type into one product, which sums in FP16.
    """
    data = projected(flow, node)
    if data is None:
        return False
    readers = (reader for _, reader in flow.readers(data) if id(reader) not in apart)
    return sum(projected(flow, reader) == data for reader in readers) == 1


def has_fp32_epilogue(
    flow: Dataflow,
    product: NodeProto,
    ends: Sequence[tuple[str, NodeProto]],  # its readers, each with the name that it reads
    apart: AbstractSet[int] = frozenset(),  # as for `stands_alone`
) -> bool:
    """True if an FP16 product sums in FP32 for its readers where these are FP32.

    All of them are elementwise, or views that only norms read, and nothing else reads the result.
    """
    seen = {product.output[0], *(name for name, _ in ends)}
    hidden = bool(ends) and not any(map(flow.is_output, seen))
    return hidden and all(_may_end(flow, n) for _, n in ends) and stands_alone(flow, product, apart)


def _may_end(flow: Dataflow, reader: NodeProto) -> bool:
    """True if the reader, in FP32, can begin the epilogue of a product."""
    if reader.op_type in ELEMENTWISE:
        return True
    read = [n for _, n in flow.readers(reader.output[0])] if reader.op_type in LAYOUTS else []
    return bool(read) and all(n.op_type in ROW_NORMS for n in read)


def elementwise_after(flow: Dataflow, tensor: str, stop: Test = lambda node: False) -> list[NodeProto]:
    """The elementwise nodes that compute from one tensor and constants; none if anything else reads it.

    Args:
        stop: True for a node that does not belong to them, and neither does what it computes.
    """
    inside, nodes, stack = {tensor}, dict[int, NodeProto](), [tensor]
    while stack:
        for _, reader in flow.readers(stack.pop()):
            computed = {flow.source(name) for name in reader.input if not flow.is_constant(name)}
            new = reader.op_type in ELEMENTWISE and id(reader) not in nodes and not stop(reader)
            if new and computed <= inside:
                nodes[id(reader)] = reader
                inside.update(reader.output)
                stack.extend(reader.output)
    alone = all(id(reader) in nodes for _, reader in flow.readers(tensor))
    return list(nodes.values()) if alone and not flow.is_output(tensor) else []


Operands = Literal["fp32", "nearest", "truncated"]
"""Operands stay FP32, are rounded to the nearest TF32 number, or lose the bits that TF32 lacks."""

Dims = Sequence[object]  # a shape; a dimension that is no `int` is unknown

SHORT_DEPTH = 4  # a MatMul of at most this many products a sum runs in FP32

SHORT_WINDOW = 9  # a Conv of one channel with at most this many products a sum runs in FP32

TWO_CHANNELS = 2  # a pointwise Conv of at most this many channels runs in FP32

LONG_ROW = 256
"""A Conv whose kernel is one high and at least this wide runs without Tensor Cores; one of 39 does not."""

MANY_ROWS = 128
"""A product of at most so many rows with one column runs without Tensor Cores: 100 did, 1000 did not."""

FEW_CHANNELS = 32
"""Convs of fewer input channels and at most as many output channels cut the operands off. One of more output
channels sums every tap by itself in FP16, however few channels it reads."""


def operands_of(node: NodeProto, left: Dims, right: Dims) -> Operands:
    """How the kernel of an FP32 product treats its operands; "nearest" if shapes are unknown.

    Args:
        node: A MatMul, Gemm, Conv or ConvTranspose.
        left, right: Shapes of its first two inputs; () if unknown.
    """
    if node.op_type in ("MatMul", "Gemm"):
        return _of_matrices(node, left, right)
    if is_depthwise(node, right):
        return "fp32"
    dense = node.op_type == "Conv" and attribute(node, "group", 1) == 1 and len(right) > 2
    if not dense or not all(isinstance(size, int) for size in right):
        return "nearest"
    outputs, channels, *kernel = (size for size in right if isinstance(size, int))
    return _of_conv(node, outputs, channels, kernel)


def sums_in_fp32(node: NodeProto, left: Dims, right: Dims) -> bool:
    """True if the kernel of an FP16 product sums in FP32, whatever reads it; arguments of `operands_of`."""
    if node.op_type in ("MatMul", "Gemm"):
        return _is_vector_product(node, left, right)
    return is_depthwise(node, right) or (node.op_type == "Conv" and _has_long_row(right[2:]))


def _of_matrices(node: NodeProto, left: Dims, right: Dims) -> Operands:
    """A product with a vector needs no Tensor Core, and short sums do not fill one."""
    if _is_vector_product(node, left, right):
        return "fp32"
    if len(left) < 2:
        return "nearest"
    depth = left[-2] if attribute(node, "transA", 0) else left[-1]
    return "fp32" if isinstance(depth, int) and depth <= SHORT_DEPTH else "nearest"


def _is_vector_product(node: NodeProto, left: Dims, right: Dims) -> bool:
    if len(left) < 2 or len(right) < 2:
        return 1 in (len(left), len(right))
    rows = left[-1] if attribute(node, "transA", 0) else left[-2]
    columns = right[-2] if attribute(node, "transB", 0) else right[-1]
    leading = left[:-2] if len(right) == 2 else ()  # rows of one product; with weights of their own, products
    if rows == 1 and all(size == 1 for size in leading):
        return True
    sizes = [size for size in (*leading, rows) if isinstance(size, int)]
    return columns == 1 and len(sizes) == len(leading) + 1 and math.prod(sizes) <= MANY_ROWS


def _has_long_row(kernel: Dims) -> bool:
    return len(kernel) == 2 and kernel[0] == 1 and isinstance(kernel[1], int) and kernel[1] >= LONG_ROW


def _of_conv(node: NodeProto, outputs: int, channels: int, kernel: Sequence[int]) -> Operands:
    taps = math.prod(kernel)
    if (channels == 1 and taps <= SHORT_WINDOW) or (taps == 1 and channels <= TWO_CHANNELS):
        return "fp32"
    if _has_long_row(kernel):
        return "fp32"
    pointwise = taps == 1 and all(step == 1 for step in attribute(node, "strides", [1]))
    few = channels < FEW_CHANNELS and outputs <= FEW_CHANNELS
    return "truncated" if few and not pointwise else "nearest"
