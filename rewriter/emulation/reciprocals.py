"""Division by a constant in an emulation: TensorRT multiplies by the reciprocal, rounded to FP16.

It divides exactly where nothing but the graph's output reads the quotient (one H200, TensorRT-RTX 1.6.1;
docs/accuracy.md#rounded-reciprocals).
"""

from __future__ import annotations

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, numpy_helper

from rewriter.emulation.local_functions import paired
from rewriter.model import Array, Model, walk_graphs
from rewriter.model.facts import Facts


def multiply_by_reciprocals(emulated: Model, given: Model, facts: Facts) -> None:
    """Turn the FP16 divisions of `given` by constants into products in `emulated`.

    Args:
        emulated: The result of `retype` on `given`, with the same Div nodes; changed in place.
        facts: Of `given`.
    """
    graphs = list(walk_graphs(given.proto.graph))
    for scope, graph, pairs in paired(given, emulated, frozenset({"Div"})):
        known = facts.main | facts.scopes[scope]
        constants = _constants(graphs[scope])
        read = _computed_with(graphs[scope])
        for node, position in pairs:
            result, divisor = known.get(node.output[0]), constants.get(node.input[1])
            if result is None or result.dtype != TensorProto.FLOAT16 or divisor is None:
                continue
            if node.output[0] in read:
                _multiply(graph, graph.node[position], divisor)


def _computed_with(graph: GraphProto) -> set[str]:
    """The tensors that a node reads, apart from Casts whose results are outputs alone."""
    read: set[str] = set()
    for node in reversed(graph.node):
        if node.op_type != "Cast" or node.output[0] in read:
            read.update(node.input)
    return read


def _constants(graph: GraphProto) -> dict[str, Array]:
    """The scalar float constants of a graph."""
    tensors = {t.name: t for t in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            tensors[node.output[0]] = node.attribute[0].t
    small = {name: tensor for name, tensor in tensors.items() if int(np.prod(tensor.dims)) == 1}
    return {name: numpy_helper.to_array(tensor) for name, tensor in small.items()}


def _multiply(graph: GraphProto, node: NodeProto, divisor: Array) -> None:
    """Replaces x / c by x * fp16(1 / c)."""
    value = divisor.astype(np.float64)
    with np.errstate(divide="ignore", over="ignore"):
        reciprocal = (1.0 / value).astype(np.float16).astype(np.float32)
    if not np.isfinite(reciprocal).all():
        return
    name = f"{node.output[0]}/reciprocal"
    graph.initializer.append(numpy_helper.from_array(reciprocal, name))
    node.op_type = "Mul"
    node.input[1] = name
