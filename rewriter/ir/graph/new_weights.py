"""Constants that replace weights, and the reasons why a weight or a Gemm cannot be written another way."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np
from onnx import NodeProto

from rewriter.ir.graph.editor import GraphEditor
from rewriter.ir.graph.float_types import EXCHANGEABLE, NUMPY_TYPES
from rewriter.ir.graph.match import optional_input
from rewriter.ir.graph.nodes import attribute
from rewriter.ir.graph.view import GraphView
from rewriter.ir.graph.weights import constant_row, is_own, is_quantised
from rewriter.ir.model import Array


@dataclass(frozen=True)
class NewWeights:
    """New constants of one graph, by what they are made of: nodes that share a weight go on sharing it."""

    graph: GraphEditor
    names: dict[Hashable, str] = field(default_factory=dict)

    def made(self, key: Hashable, base: str, make: Callable[[], Array]) -> str:
        """Returns the name of the constant of `key`; `make` makes a new one, and `base` its name."""
        if key not in self.names:
            self.names[key] = self.graph.add_constant(base, np.ascontiguousarray(make()))
        return self.names[key]

    def changed(self, weight: str, suffix: str, change: Callable[[Array], Array]) -> str:
        """Returns the name of the constant `weight` after `change`."""
        return self.made(weight, f"{weight}/{suffix}", lambda: change(self.graph.value(weight)))


def layout_obstacle(graph: GraphView, weight: str) -> str | None:
    """Returns why a weight cannot be written in another layout; None if it can."""
    if is_quantised(graph, weight):
        return "its weight is quantised: TensorRT runs it so"
    if not is_own(graph, weight):
        return "its weight belongs to an enclosing graph, and would be copied"
    if graph.dtype(weight) not in EXCHANGEABLE:
        return "its weight is of a type that TensorRT has no product for"
    return None


def float_matrix(graph: GraphView, tensor: str) -> Array | None:
    """A constant matrix, of a float type that TensorRT multiplies in; None for other tensors."""
    value = graph.constant(tensor)
    fits = value is not None and value.ndim == 2 and value.dtype in NUMPY_TYPES.values()
    return value if fits else None


def is_transposed(node: NodeProto) -> bool:
    """True for a product by a weight [columns, depth]."""
    return node.op_type == "Gemm" and bool(attribute(node, "transB", 0))


def gemm_obstacle(node: NodeProto) -> str | None:
    """Returns why a Gemm is no MatMul and Add of its C; None if it is, and for a MatMul."""
    if node.op_type == "MatMul":
        return None
    beta = attribute(node, "beta", 1.0) if optional_input(node, 2) else 1.0
    if attribute(node, "alpha", 1.0) != 1 or beta != 1:
        return "its alpha or beta is not 1"
    return "it transposes its data" if attribute(node, "transA", 0) else None


def row_obstacle(graph: GraphView, node: NodeProto, columns: int) -> str | None:
    """Returns why the C of a Gemm is not added to every row alike; None if it is, or if there is none."""
    c = optional_input(node, 2)
    row = constant_row(graph, c, columns, rank=2) if c else None
    return f"its C, {c}, is no constant row" if c and row is None else None
