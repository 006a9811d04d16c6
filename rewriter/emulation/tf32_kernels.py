"""How TensorRT's kernels treat the operands of an FP32 product: exact, rounded to TF32, or cut off to TF32.

The classes are those of 887 single nodes on one H100 with TensorRT-RTX 1.6.1, 367 of them from networks with
trained weights: 8 differ, each between rounded and cut off (docs/accuracy.md#tf32-kernels).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from onnx import NodeProto

from rewriter.graph import attribute
from rewriter.graph.fusion import is_depthwise

Operands = Literal["fp32", "nearest", "truncated"]
"""Operands stay FP32, are rounded to the nearest TF32 number, or lose the bits that TF32 has not."""

Dims = Sequence[object]
"""A shape; a dimension that is no `int` is unknown."""

SHORT_DEPTH = 4
"""A MatMul of at most this many products a sum runs in FP32."""

SHORT_WINDOW = 9
"""A Conv of one channel with at most this many products a sum runs in FP32."""

TWO_CHANNELS = 2
"""A pointwise Conv of at most this many channels runs in FP32."""

LONG_ROW = 256
"""A Conv whose kernel is at least this wide and one high runs in FP32; one of 39 runs in TF32."""

FEW_CHANNELS = 32
"""Convs of fewer input channels and at most as many output channels cut the operands off."""


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


def _of_matrices(node: NodeProto, left: Dims, right: Dims) -> Operands:
    """A product with a vector needs no Tensor Core, and short sums do not fill one."""
    if len(left) < 2 or len(right) < 2:
        return "fp32" if 1 in (len(left), len(right)) else "nearest"
    rows, depth = left[-2:] if not attribute(node, "transA", 0) else (left[-1], left[-2])
    columns = right[-1] if not attribute(node, "transB", 0) else right[-2]
    if len(right) == 2:  # leading dimensions are rows of one product
        above = [size for size in left[:-2] if size != 1]
        rows = rows if not above else None
    short = isinstance(depth, int) and depth <= SHORT_DEPTH
    return "fp32" if rows == 1 or columns == 1 or short else "nearest"


def _of_conv(node: NodeProto, outputs: int, channels: int, kernel: Sequence[int]) -> Operands:
    taps = math.prod(kernel)
    if (channels == 1 and taps <= SHORT_WINDOW) or (taps == 1 and channels <= TWO_CHANNELS):
        return "fp32"
    if len(kernel) == 2 and kernel[0] == 1 and kernel[1] >= LONG_ROW:
        return "fp32"
    pointwise = taps == 1 and all(step == 1 for step in attribute(node, "strides", [1]))
    few = channels < FEW_CHANNELS and outputs <= FEW_CHANNELS
    return "truncated" if few and not pointwise else "nearest"
