"""Division by a constant in an emulation: TensorRT multiplies by the reciprocal, rounded to FP16.

It divides exactly where nothing but the graph's output reads the quotient (one H200, TensorRT-RTX 1.6.1;
docs/accuracy.md#rounded-reciprocals).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, numpy_helper

from rewriter.ir.graph import open_graphs
from rewriter.ir.graph.fusion import rounded_reciprocal
from rewriter.ir.model import Model
from rewriter.ir.model.facts import Facts
from rewriter.runtime.emulation.local_functions import paired


def multiply_by_reciprocals(emulated: Model, given: Model, facts: Facts) -> None:
    """Turn the FP16 divisions of `given` by constants into products in `emulated`.

    Args:
        emulated: The result of `retype` on `given`, with the same Div nodes; changed in place.
        facts: Of `given`.
    """
    graphs = open_graphs(given, facts)
    for scope, graph, pairs in paired(given, emulated, frozenset({"Div"})):
        source = graphs[scope]
        read = _computed_with(source.graph)
        for node, position in pairs:
            if source.dtype(node.output[0]) != TensorProto.FLOAT16 or node.output[0] not in read:
                continue
            divisor = source.scalar(node.input[1])
            factor = None if divisor is None else rounded_reciprocal(divisor)
            if factor is not None:
                _multiply(graph, graph.node[position], factor, source.value(node.input[1]).shape)


def _computed_with(graph: GraphProto) -> set[str]:
    """The tensors that a node reads, apart from Casts whose results are outputs alone."""
    read: set[str] = set()
    for node in reversed(graph.node):
        if node.op_type != "Cast" or node.output[0] in read:
            read.update(node.input)
    return read


def _multiply(graph: GraphProto, node: NodeProto, factor: float, shape: Sequence[int]) -> None:
    """Replaces a division by a product with `factor`; with the divisor's shape, it broadcasts alike."""
    name = f"{node.output[0]}/reciprocal"
    graph.initializer.append(numpy_helper.from_array(np.full(shape, factor, np.float32), name))
    node.op_type = "Mul"
    node.input[1] = name
