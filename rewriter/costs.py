"""What it costs to keep a node in FP32, without a GPU: recorded times, scaled by the node's size.

Source: one H200, TensorRT-RTX 1.6.1, strongly typed, medians of repeated runs. MatMul 4096^3 took 200 us
in FP16 and 207 us between Casts from and to FP32, 8192x768x3072 took 59 and 64 us, and attention whose
QK^T was in FP32 471 instead of 139 us, because it was not fused any more. Conv with 64, 256 and 512
channels took 23, 21 and 26 us in FP16 and 26, 29 and 54 us in FP32. Of memory-bound operators FP32 reads
and writes twice the bytes. Another GPU or release gives other figures: they rank nodes, and no more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import prod

from onnx import NodeProto

from rewriter.facts import Facts, Shape
from rewriter.model import Model
from rewriter.plan import Plan
from rewriter.planner import node_key

ORIGIN = "recorded on an H200, not measured here"

PRODUCTS_PER_US = 3.4e8
"""Multiply-adds of an FP16 MatMul: 4096^3 in 200 us, 8192x768x3072 in 59 us (3.3e8)."""

BYTES_PER_US = 4.8e6
"""Memory bandwidth of an H200, 4.8 TB/s (NVIDIA's data sheet)."""

EXTRA: dict[str, tuple[tuple[float, float], ...]] = {
    "MatMul": ((3e10, 0.08), (float("inf"), 0.035)),
    "Conv": ((100.0, 0.13), (300.0, 0.38), (float("inf"), 1.08)),
    "attention": ((float("inf"), 2.4),),
}
"""Extra time of an FP32 node as a share of its FP16 time, up to a size: multiply-adds of a MatMul,
input channels of a Conv."""

TYPICAL = 64
"""Stands for a dimension that is not known."""

Shapes = Mapping[str, Shape | None]


def extra_us(node: NodeProto, shapes: Shapes, constants: AbstractSet[str]) -> float:
    """Estimated extra microseconds of the node in FP32.

    Args:
        shapes: Of the node's tensors, by name.
        constants: Names of constant tensors: a MatMul of two others is attention's.
    """
    out = _sizes(shapes.get(node.output[0]))
    if node.op_type in {"MatMul", "Gemm"}:
        return _matmul(node, shapes, constants, out)
    if node.op_type in {"Conv", "ConvTranspose"}:
        kernel = _sizes(shapes.get(node.input[1]))
        products = prod(out) * prod(kernel[1:])
        channels = kernel[1] if len(kernel) > 1 else TYPICAL
        return _share("Conv", channels) * products / PRODUCTS_PER_US
    names = [name for name in (*node.input, *node.output) if name and name not in constants]
    return 2.0 * sum(prod(_sizes(shapes.get(name))) for name in names) / BYTES_PER_US


def base_us(node: NodeProto, shapes: Shapes, constants: AbstractSet[str]) -> float:
    """Estimated microseconds of the node in FP16."""
    out = _sizes(shapes.get(node.output[0]))
    if node.op_type in {"MatMul", "Gemm"}:
        left = _sizes(shapes.get(node.input[0]))
        return prod(out) * (left[-1] if left else TYPICAL) / PRODUCTS_PER_US
    if node.op_type in {"Conv", "ConvTranspose"}:
        return prod(out) * prod(_sizes(shapes.get(node.input[1]))[1:]) / PRODUCTS_PER_US
    return extra_us(node, shapes, constants)  # FP32 moves twice the bytes: as much again


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


def _matmul(node: NodeProto, shapes: Shapes, constants: AbstractSet[str], out: Sequence[int]) -> float:
    left = _sizes(shapes.get(node.input[0]))
    products = prod(out) * (left[-1] if left else TYPICAL)
    fused = not any(name in constants for name in node.input[:2])
    return _share("attention" if fused else "MatMul", products) * products / PRODUCTS_PER_US


def _share(kind: str, size: float) -> float:
    return next(share for most, share in EXTRA[kind] if size <= most)


def _sizes(shape: Shape | None) -> tuple[int, ...]:
    return tuple(d if isinstance(d, int) else TYPICAL for d in shape or ())
