"""Ranges at the largest shapes of the optimisation profile: sums grow with an axis beyond the samples."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod

import numpy as np
from onnx import NodeProto

from rewriter.ir.float_graph import FloatGraph
from rewriter.ir.graph import attribute
from rewriter.ir.graph.ops import CONVOLUTIONS, SOFTMAX, SUMS, VALUE_PRESERVING
from rewriter.ir.model import Model
from rewriter.runtime.engines.tensor_files import Shape
from rewriter.runtime.ranges import Ranges

_KEEPS = (
    VALUE_PRESERVING
    | SUMS
    | CONVOLUTIONS
    | frozenset("Clip Pad Cast LeakyRelu ReduceMean Ceil Floor".split())
)
"""Operators whose results grow as their largest input does."""

_POWERS = {
    "ReduceSum": (1.0, 1.0),
    "ReduceL1": (1.0, 1.0),
    "ReduceSumSquare": (2.0, 1.0),
    "ReduceL2": (1.0, 0.5),
}
"""Powers of the growth of the input, and of the axis that is summed."""


def scale_to_profile(model: Model, ranges: Ranges, beyond: Mapping[str, tuple[Shape, Shape]]) -> None:
    """Scales the ranges of the main graph that grow with a dynamic axis; `beyond` as in `DataSource`."""
    growth, other = dict[object, float](), 1.0
    for port in model.signature.inputs:
        for axis, (name, seen, most) in enumerate(
            zip(port.shape or (), *beyond.get(port.name, ((), ())), strict=False)
        ):
            growth[name] = max(growth.get(name, 1.0), most / max(1, seen))
            other = max(other, most / max(1, seen) if axis or len(port.shape or ()) == 1 else 1.0)
    if not growth:
        return
    sums = _Growth(FloatGraph.main(model), growth, other)
    for node in sums.graph.graph.nodes:
        factor = sums.of(node)
        for tensor in node.output:
            sums.factors[tensor] = factor
            measured = ranges.get((0, tensor))
            if measured is not None and factor > 1.0:
                low, high, mean = (factor * v for v in (measured.low, measured.high, measured.mean_abs))
                ranges[0, tensor] = replace(measured, low=low, high=high, mean_abs=mean)


class _Growth:
    """How many times as large results become; `axes` by name, `other` for an axis without a known name."""

    def __init__(self, graph: FloatGraph, axes: Mapping[object, float], other: float) -> None:
        self.graph, self.axes, self.other = graph, axes, other
        self.factors: dict[str, float] = {}

    def of(self, node: NodeProto) -> float:
        """The growth of a node's results, if their terms have one sign."""
        inputs = [self.factors.get(tensor, 1.0) for tensor in node.input]
        op, first = node.op_type, inputs[0] if inputs else 1.0
        if op in {"Range", "Shape", "Size", "NonZero"}:
            return self.other
        if op in _POWERS:
            own, along = _POWERS[op]
            given = self.graph.constant(node.input[1]) if len(node.input) > 1 and node.input[1] else None
            axes = attribute(node, "axes") if given is None else given
            return float(first**own * self._axes(node.input[0], axes) ** along)
        if op == "CumSum":
            return first * self._axes(node.input[0], np.ravel(self.graph.scalar(node.input[1]) or 0))
        if op in {"MatMul", "Gemm", "Einsum"}:
            return prod(inputs[:2]) * self._contracted(node)
        if op in {"Mul", "Div"}:
            return prod(inputs) if op == "Mul" else first / inputs[1]
        if op in {"Sqrt", "Pow"}:
            return float(first ** max(0.0, self.graph.exponent(node)))
        kinds = [self.graph.graph.dtype(tensor) for tensor in (*node.input, *node.output[:1])]
        values = [
            factor for factor, kind in zip(inputs, kinds, strict=False) if kind == kinds[-1] or op == "Cast"
        ]
        return max(values, default=1.0) if op in _KEEPS else 1.0  # no indices

    def _axes(self, tensor: str, axes: Iterable[int] | None) -> float:
        """Growth of the number of elements along these axes; along all of them for None."""
        shape = self.graph.graph.shape(tensor) or ()
        chosen = range(len(shape)) if axes is None else map(int, axes)
        sizes = [shape[axis] for axis in chosen if -len(shape) <= axis < len(shape)]
        return prod(1.0 if isinstance(size, int) else self.axes.get(size, self.other) for size in sizes)

    def _contracted(self, node: NodeProto) -> float:
        """Growth of the terms of a product; 1 beside weights and probabilities, whose rows sum to 1."""
        makers = [self.graph.producer(tensor) for tensor in node.input[:2]]
        weights = any(self.graph.is_constant(tensor) for tensor in node.input[:2])
        if node.op_type == "Einsum" or weights or any(m is not None and m.op_type in SOFTMAX for m in makers):
            return 1.0
        return self._axes(node.input[0], [0 if attribute(node, "transA", 0) else -1])
