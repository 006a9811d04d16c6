"""Writes a product with its data and its weight split into two FP16 tensors each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto

from rewriter.base import Change, Kept, Spent
from rewriter.graph import GraphEditor, label
from rewriter.graph.new_weights import NewWeights, layout_obstacle
from rewriter.model import Array
from rewriter.planning.costs.node_times import TILE
from rewriter.rewriting.product_splitting.latency import split_us
from rewriter.rewriting.product_splitting.operands import SplitOperand
from rewriter.rewriting.rounding import Grid

FP16 = Grid(TensorProto.FLOAT16)

MOST_AXES = 3
"""TensorRT reshapes a tensor of more axes to a matrix before a product, which then sums in FP16."""


@dataclass(frozen=True)
class Splitting:
    """Replaces one product."""

    graph: GraphEditor
    node: NodeProto
    source: SplitOperand
    weights: NewWeights

    @property
    def sizes(self) -> tuple[int, ...]:
        """Shape of the data; () if it is unknown."""
        return self.graph.sizes(self.node.input[0]) or ()

    @property
    def columns(self) -> int:
        """Columns of the given weight."""
        return int(self._value().shape[1])

    def _value(self) -> Array:
        """The given weight [depth, columns]."""
        return self.graph.value(self.node.input[1])

    @property
    def us(self) -> float:
        """Estimated extra microseconds."""
        return split_us(self._value().size)

    @property
    def tiles(self) -> int:
        """Tiles of the larger product's result."""
        rows = math.prod(self.sizes[:-1])
        return math.ceil(2 * rows / TILE) * math.ceil(2 * self.columns / TILE)

    def reason_against(self, projections: int, kept: Kept) -> str | None:
        """The reason not to split it, or None; `projections`: number of products of its data."""
        reason = kept.reason(self.node) or layout_obstacle(self.graph, self.node.input[1])
        if reason := reason or FP16.refusal(self._value()):
            return reason
        if len(self.sizes) < 2:
            return f"the rows of {self.node.input[0]} are unknown: give the model fixed shapes"
        if len(self.sizes) > MOST_AXES:
            return f"{self.node.input[0]} has {len(self.sizes)} axes: TensorRT sums such a product in FP16"
        if not self.source.plain:
            return f"{self.node.input[0]} is no norm over the last axis, or has been moved since"
        if self.graph.rank(self.source.tensor) != len(self.sizes):
            return f"{self.source.tensor} has other axes than {self.node.input[0]}"
        if projections > 1:
            return (
                f"TensorRT merges the {projections} products of {self.node.input[0]}: run merge-projections"
            )
        return None

    def write(self) -> Change:
        """Replace the node by the larger product and the sums of its parts."""
        out, us = self.node.output[0], self.us
        product = self._add("MatMul", [self._stacked(), self._weight()], "wide")
        zeros = self.graph.add_constant(f"{out}/zeros", np.zeros(2 * self.columns, np.float32))
        summed = self._add("Add", [product, zeros], "summed")
        top, bottom = self._halves(summed, -2, self.sizes[-2], ("top", "bottom"))
        added = self._add("Add", [bottom, top], "added")
        large, small = self._halves(added, -1, self.columns, ("large", "small"))
        self.graph.substitute(out, self.graph.make("Add", [small, large], [out], name=label(self.node)))
        return Spent(label(self.node), "data and weight split", us)

    def _stacked(self) -> str:
        """The data as rows of hi with the rows of lo below; `mixed-precision` keeps these Casts."""
        *outer, rows, depth = self.sizes
        up = self._add("Unsqueeze", [self.source.tensor, self._ints("axis", -3)], "up")
        data = self._add("Expand", [up, self._ints("twice", 2, 1, 1)], "repeated")
        if (norm := self.source.norm) is not None:
            normed = self._tensor("normed")
            self._insert(self.graph.again(norm, [data, *norm.input[1:]], [normed], axis=-1))
            data = normed
        limited = self._add("Clip", [data, self._limit("least", -1.0), self._limit("most", 1.0)], "limited")
        half = self._add("Cast", [limited], "half", to=TensorProto.FLOAT16)
        hi = self._add("Cast", [half], "hi", to=TensorProto.FLOAT)
        lo = self._add("Sub", [data, hi], "lo")
        second = self.graph.add_constant(f"{self.node.output[0]}/second", np.array([[[False]], [[True]]]))
        picked = self._add("Where", [second, lo, hi], "picked")
        return self._add("Reshape", [picked, self._ints("stacked", *outer, 2 * rows, depth)], "stacked")

    def _limit(self, name: str, sign: float) -> str:
        """FP16's largest number: a larger value goes into lo, which is right if the product stays FP32."""
        return self.graph.add_constant(f"{self.node.output[0]}/{name}", np.float32(sign) * FP16.largest)

    def _weight(self) -> str:
        """Name of the constant [depth, columns of hi, columns of lo], FP32 with values of FP16."""

        def both(value: Array) -> Array:
            hi = FP16.nearest(value)
            return np.concatenate([hi, FP16.nearest(value - hi)], axis=1)

        return self.weights.changed(self.node.input[1], "split", both)

    def _halves(self, tensor: str, axis: int, size: int, names: tuple[str, str]) -> tuple[str, str]:
        first, second = (self._tensor(name) for name in names)
        sizes = self._ints(f"{names[0]}/sizes", size, size)
        self._insert(self.graph.make("Split", [tensor, sizes], [first, second], axis=axis))
        return first, second

    def _add(self, op_type: str, inputs: list[str], name: str, **attributes: Any) -> str:
        made = self._tensor(name, attributes.get("to", TensorProto.FLOAT))
        self._insert(self.graph.make(op_type, inputs, [made], **attributes))
        return made

    def _insert(self, node: NodeProto) -> None:
        self.graph.insert(node, before=self.node)

    def _tensor(self, name: str, dtype: int = TensorProto.FLOAT) -> str:
        return self.graph.tensor(f"{self.node.output[0]}/{name}", dtype=dtype)

    def _ints(self, name: str, *values: int) -> str:
        return self.graph.add_ints(f"{self.node.output[0]}/{name}", *values)
