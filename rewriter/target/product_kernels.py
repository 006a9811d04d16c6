"""How TensorRT's kernels compute a product, by its shape.

FP32 products run exactly, or with operands rounded or truncated to TF32; FP16 products sum in FP16 or FP32.
The classes were measured on single nodes (H100, TensorRT-RTX 1.6.1; docs/accuracy.md#kernels-of-products).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from onnx import NodeProto

from rewriter.ir.graph import attribute
from rewriter.target.fusion import is_depthwise

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
