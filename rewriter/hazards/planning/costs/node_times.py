"""Estimated time of single nodes in FP16 and FP32, without a GPU: recorded times, scaled by the node's size.

Source: 14 networks on one H200 with TensorRT-RTX 1.6.1, strongly typed, batch 1, medians, as `fix` made them
and in FP32 (TF32). The constants are a non-negative least squares fit of the relative error, which
benchmarks/latency_estimate.py made (last in commit 3a19a1f). Another GPU or release gives other figures.
They show:

- A small kernel costs a fixed time.
- The time of a product with few tiles grows with the depth of its sum: nothing else runs in parallel.
- A MatMul with FP32 weights (TF32) takes 3 to 7 times as long.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from math import ceil, prod

from onnx import NodeProto

from rewriter.ir.graph.fusion import conv_depth, is_depthwise
from rewriter.ir.graph.ops import CONVOLUTIONS, NORMS, PRODUCTS, SHUFFLES, VIEWS
from rewriter.ir.model.facts import Shape

ORIGIN = "recorded on an H200, not measured here"

LOW_US: Mapping[str, float] = {
    "kernel": 3.28,
    "norm": 5.21,
    "waves": 3.10e-3,
    "moved": 5.55e-7,
    "attention": 1.08e-8,
}
"""Microseconds in FP16 for each unit of `terms`. `attention` is not fitted: 139 us for both products of
8 x 12 x 1024 x 1024 x 64."""

MORE_US: Mapping[str, float] = {
    "matmul": 4.77,
    "products": 1.88e-8,
    "conv-products": 3.42e-9,
    "depth": 6.10e-3,
    "channels": 2.61e-3,
}
"""Extra microseconds in FP32 for each unit of `terms`. Attention and Casts are priced in `prices`."""

PRODUCTS_PER_US = {"MatMul": 3.4e8, "Conv": 2.2e8}
"""Highest rate of multiply-adds in FP16: MatMul 4096^3 took 200 us, Conv of 512 channels on 56 x 56 33 us."""

BYTES_PER_US = 4.8e6
"""Memory bandwidth of an H200, 4.8 TB/s (NVIDIA's data sheet)."""

ALIGNED = 8
"""Rows of an FP16 matrix that Tensor Cores take at once; attention over another number is ragged."""

TILE, PROCESSORS = 128, 132
"""Rows and columns of a result that one multiprocessor computes at a time, in large FP16 kernels, and the
multiprocessors of an H200 (NVIDIA's data sheet). More tiles than multiprocessors are computed in waves."""

NORM_KERNELS = NORMS | {"ReduceMean"}
"""Kernels of their own with two passes over the data; a ReduceMean stands for a norm that is written out."""

TYPICAL = 64
"""Size of an unknown dimension."""

Shapes = Mapping[str, Shape | None]


def terms(
    node: NodeProto, shapes: Shapes, constants: AbstractSet[str], *, attention: bool = False
) -> dict[str, float]:
    """The quantities that a node's time grows with.

    Args:
        shapes: Of the node's tensors, by name.
        constants: Names of constant tensors.
        attention: True for a product of an attention that is one kernel.

    Returns:
        `kernel`: matrix operators, of which `matmul`; their multiply-adds as `products` or
        `conv-products`; `depth`: length of a Conv's sums, `channels` where its window is one element;
        `waves`: length of the sums, times how often all multiprocessors are busy with tiles of the result;
        `attention`: an attention's multiply-adds, and `ragged` half an attention of unaligned rows;
        `norm`: such kernels; `moved`: elements at the border of others.
    """
    kind, count = products(node, shapes)
    if attention:
        rows = _sizes(shapes.get(node.input[0]))
        return {"attention": count, "ragged": 0.5 * bool(len(rows) > 1 and rows[-2] % ALIGNED)}
    if kind == "MatMul":
        depth = (_sizes(shapes.get(node.input[0])) or (TYPICAL,))[-1]
        waves = _waves(node, shapes, channels=-1) * depth
        return {"kernel": 1.0, "matmul": 1.0, "products": count, "waves": waves}
    if kind == "Conv":
        depth = conv_depth(node, _sizes(shapes.get(node.input[1]))) if count else 0
        waves = _waves(node, shapes, channels=1) * depth
        per_window = "depth" if _taps(node, shapes) > 1 else "channels"
        return {"kernel": 1.0, "conv-products": count, per_window: float(depth), "waves": waves}
    if node.op_type in VIEWS - SHUFFLES:  # the prices were fitted to networks that have shuffles
        return {}
    return {
        "norm": float(node.op_type in NORM_KERNELS),
        "moved": float(moved_elements(node, shapes, constants)),
    }


def base_us(
    node: NodeProto, shapes: Shapes, constants: AbstractSet[str], *, attention: bool = False
) -> float:
    """Estimated microseconds of the node in FP16; arguments as for `terms`."""
    found = terms(node, shapes, constants, attention=attention)
    kind, count = products(node, shapes)
    least = count / PRODUCTS_PER_US[kind] if kind and not attention else 0.0
    return max(least, sum(LOW_US.get(name, 0.0) * value for name, value in found.items()))


def more_us(node: NodeProto, shapes: Shapes, constants: AbstractSet[str]) -> float:
    """Estimated extra microseconds of the node's own kernel in FP32."""
    found = terms(node, shapes, constants)
    if products(node, shapes)[0]:
        return sum(MORE_US.get(name, 0.0) * value for name, value in found.items())
    return 2.0 * moved_elements(node, shapes, constants) / BYTES_PER_US


def is_attention(node: NodeProto, constants: AbstractSet[str]) -> bool:
    """True if the node multiplies two computed tensors."""
    return node.op_type == "MatMul" and not any(name in constants for name in node.input)


def products(node: NodeProto, shapes: Shapes) -> tuple[str, float]:
    """The kind of a matrix operator and its multiply-adds; ("", 0) for others.

    Those of a depthwise Conv do not count: it is bound by memory.
    """
    if node.op_type in PRODUCTS:
        left = _sizes(shapes.get(node.input[0]))
        return "MatMul", float(elements(node.output[0], shapes) * (left[-1] if left else TYPICAL))
    if node.op_type in CONVOLUTIONS:
        kernel = _sizes(shapes.get(node.input[1]))
        count = elements(node.output[0], shapes) * conv_depth(node, kernel)
        return "Conv", 0.0 if is_depthwise(node, kernel) else float(count)
    return "", 0.0


def _taps(node: NodeProto, shapes: Shapes) -> int:
    """Elements of a Conv's window."""
    return prod(_sizes(shapes.get(node.input[1]))[2:])


def _waves(node: NodeProto, shapes: Shapes, *, channels: int) -> float:
    """Tiles of a product's result for each multiprocessor, at least one; `channels`: the axis of columns."""
    sizes = _sizes(shapes.get(node.output[0]))
    if len(sizes) < 2:
        return 1.0
    columns = sizes[channels]
    rows = prod(sizes) // max(1, columns)
    return max(1.0, ceil(rows / TILE) * ceil(columns / TILE) / PROCESSORS)


def moved_elements(node: NodeProto, shapes: Shapes, constants: AbstractSet[str]) -> int:
    """Elements of the node's inputs and outputs, without constants."""
    names = [name for name in (*node.input, *node.output) if name and name not in constants]
    return sum(elements(name, shapes) for name in names)


def elements(tensor: str, shapes: Shapes) -> int:
    """Elements of a tensor, with `TYPICAL` for each unknown dimension."""
    return prod(_sizes(shapes.get(tensor)))


def _sizes(shape: Shape | None) -> tuple[int, ...]:
    return tuple(d if isinstance(d, int) else TYPICAL for d in shape or ())
