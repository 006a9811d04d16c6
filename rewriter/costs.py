"""What a node costs in FP16 and in FP32, without a GPU: recorded times, scaled by the node's size.

Source: one H200, TensorRT-RTX 1.6.1, strongly typed, medians of repeated runs.

Whole networks at batch 1 (benchmarks/gpu_cases.json) are made of small kernels, which cost a fixed time each
and little for their size. The constants here are the non-negative least squares fit of the relative error on
nine of them, in FP16 and in FP32. benchmarks/latency_estimate.py makes it again and says how good it is: 0.75
to 1.25 times the measured latency in FP16 (0.72 to 1.92 for a network that was left out), and 0.61 to 1.55
times in FP32.

Large single operators: MatMul 4096^3 took 200 us in FP16 and 207 us between Casts from and to FP32,
8192x768x3072 took 59 and 64 us, and attention whose QK^T was in FP32 471 instead of 139 us: it was not fused
any more. Conv with 64, 256 and 512 channels took 23, 21 and 26 us in FP16 and 26, 29 and 54 us in FP32.
Of memory-bound operators FP32 reads and writes twice the bytes. Another GPU or release gives other figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import prod

from onnx import NodeProto

from rewriter.facts import Facts, Shape
from rewriter.hazards.survey import VIEWS
from rewriter.model import Model
from rewriter.plan import Plan
from rewriter.planner import node_key

ORIGIN = "recorded on an H200, not measured here"

KERNEL_US, SMALL_PRODUCTS_PER_US, ELEMENTS_PER_US = 3.9, 1.1e8, 1.14e6
"""The fit in FP16: microseconds of each matrix operator, its multiply-adds, and elements moved by others."""

FP32_KERNEL_US, FP32_PRODUCTS_PER_US = 0.4, 2.5e7
"""The fit of what FP32 takes longer: for each matrix operator, and its multiply-adds."""

PRODUCTS_PER_US = 3.4e8
"""Multiply-adds of a large FP16 MatMul: 4096^3 in 200 us, 8192x768x3072 in 59 us (3.3e8)."""

LARGE_US = {"MatMul": 59.0, "Conv": 21.0}
"""FP16 time of the smallest large operator: up to there it is a small kernel of a network."""

EXTRA: dict[str, tuple[tuple[float, float], ...]] = {
    "MatMul": ((3e10, 0.08), (float("inf"), 0.035)),
    "Conv": ((100.0, 0.13), (300.0, 0.38), (float("inf"), 1.08)),
}
"""Extra time of a large FP32 node as a share of its FP16 time, up to a size: multiply-adds of a MatMul,
input channels of a Conv."""

ATTENTION_PRODUCTS_PER_US = 1.9e7
"""What QK^T in FP32 takes longer: 332 us for 8 x 12 x 1024 x 1024 x 64 multiply-adds."""

BYTES_PER_US = 4.8e6
"""Memory bandwidth of an H200, 4.8 TB/s (NVIDIA's data sheet)."""

UNMOVED = VIEWS - {"Transpose", "Tile"}
"""Operators that were fitted as free: fused, or a matter of addresses."""

TYPICAL = 64
"""Stands for a dimension that is not known."""

Shapes = Mapping[str, Shape | None]


def base_us(node: NodeProto, shapes: Shapes, constants: AbstractSet[str]) -> float:
    """Estimated microseconds of the node in FP16; arguments as for `extra_us`."""
    moved = 0 if node.op_type in UNMOVED else moved_elements(node, shapes, constants)
    kind, count = products(node, shapes)
    small = KERNEL_US + count / SMALL_PRODUCTS_PER_US if kind else 0.0
    large = max(LARGE_US[kind], count / PRODUCTS_PER_US) if kind else 0.0
    return min(small, large) + moved / ELEMENTS_PER_US


def extra_us(node: NodeProto, shapes: Shapes, constants: AbstractSet[str]) -> float:
    """Estimated microseconds that the node takes longer in FP32.

    Args:
        shapes: Of the node's tensors, by name.
        constants: Names of constant tensors: a MatMul of two others is attention's.
    """
    kind, count = products(node, shapes)
    if not kind:
        return 2.0 * moved_elements(node, shapes, constants) / BYTES_PER_US
    if kind == "MatMul" and not any(name in constants for name in node.input[:2]):
        return FP32_KERNEL_US + count / ATTENTION_PRODUCTS_PER_US
    size = _channels(node, shapes) if kind == "Conv" else count
    share = next(share for most, share in EXTRA[kind] if size <= most)
    large = share * max(LARGE_US[kind], count / PRODUCTS_PER_US)
    return min(FP32_KERNEL_US + count / FP32_PRODUCTS_PER_US, large)


@dataclass(frozen=True)
class Prices:
    """The estimated time of every node of the main graph, by key, in microseconds.

    Attributes:
        base: In FP16.
        extra: On top, in FP32.
    """

    base: Mapping[str, float]
    extra: Mapping[str, float]

    @classmethod
    def of(cls, model: Model, facts: Facts) -> Prices:
        graph = model.proto.graph
        shapes = {name: found.shape for name, found in facts.main.items()}
        constants = {t.name for t in graph.initializer}
        constants |= {n.output[0] for n in graph.node if n.op_type == "Constant"}
        nodes = {node_key(0, n): n for n in graph.node if n.op_type != "Constant" and any(n.output)}
        return cls(
            {key: base_us(node, shapes, constants) for key, node in nodes.items()},
            {key: extra_us(node, shapes, constants) for key, node in nodes.items()},
        )

    def total_us(self, plan: Plan) -> float:
        """One inference under `plan`."""
        return sum(self.base.values()) + sum(self.extra.get(key, 0.0) for key in plan.fp32)


def products(node: NodeProto, shapes: Shapes) -> tuple[str, float]:
    """The kind of a matrix operator and its multiply-adds; ("", 0) for others.

    Those of a depthwise Conv do not count: it is bound by memory.
    """
    out = prod(_sizes(shapes.get(node.output[0])))
    if node.op_type in {"MatMul", "Gemm"}:
        left = _sizes(shapes.get(node.input[0]))
        return "MatMul", out * (left[-1] if left else TYPICAL)
    if node.op_type in {"Conv", "ConvTranspose"}:
        depthwise = _channels(node, shapes) == 1
        return "Conv", 0.0 if depthwise else out * prod(_sizes(shapes.get(node.input[1]))[1:])
    return "", 0.0


def _channels(node: NodeProto, shapes: Shapes) -> int:
    """Input channels of each group of a Conv."""
    kernel = _sizes(shapes.get(node.input[1]))
    return kernel[1] if len(kernel) > 1 else TYPICAL


def moved_elements(node: NodeProto, shapes: Shapes, constants: AbstractSet[str]) -> int:
    """Elements of the tensors at the node's border that are no constants."""
    names = [name for name in (*node.input, *node.output) if name and name not in constants]
    return sum(prod(_sizes(shapes.get(name))) for name in names)


def _sizes(shape: Shape | None) -> tuple[int, ...]:
    return tuple(d if isinstance(d, int) else TYPICAL for d in shape or ())
