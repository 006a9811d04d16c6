"""Weights that exporters write as nodes: tensors of Constant nodes, and Identities of weights."""

from __future__ import annotations

import math

import onnx
from onnx import numpy_helper

from rewriter.ir.model.graphs import holds_graphs, refill, rename_reads, walk_graphs
from rewriter.ir.model.model import Model

LEAST_IR = 4
"""Before IR 4, every initializer had to be listed as an input."""

_WEIGHT_TYPES = frozenset(
    {
        onnx.TensorProto.FLOAT,
        onnx.TensorProto.FLOAT16,
        onnx.TensorProto.BFLOAT16,
        onnx.TensorProto.DOUBLE,
        onnx.TensorProto.INT8,
        onnx.TensorProto.UINT8,
    }
)


def with_lifted_weights(model: Model) -> Model:
    """The model with the weights of Constant nodes as initializers, and without Identities of weights.

    PaddlePaddle and torch.jit write Constants. Shapes, axes and single numbers stay as they are, and so do
    Constants and Identities that write a graph output, and bodies of functions, which have no initializers.

    Returns:
        `model` itself if there is nothing to lift.
    """
    if not any(_is_found(graph) for graph in walk_graphs(model.proto.graph)):
        return model
    result = model.copy()
    for graph in walk_graphs(result.proto.graph):
        _lift(result, graph)
    result.proto.ir_version = max(result.proto.ir_version, LEAST_IR)
    return result


def _is_found(graph: onnx.GraphProto) -> bool:
    outputs, weights = _outputs(graph), _weights(graph)
    return any(
        _constant(node, outputs) is not None or _is_copy(node, outputs, weights) for node in graph.node
    )


def _outputs(graph: onnx.GraphProto) -> set[str]:
    return {value.name for value in graph.output}


def _weights(graph: onnx.GraphProto) -> set[str]:
    """The initializers that are weights and that no caller can replace."""
    inputs = {value.name for value in graph.input}
    return {t.name for t in graph.initializer if _is_weight(t) and t.name not in inputs}


def _lift(model: Model, graph: onnx.GraphProto) -> None:
    main = graph is model.proto.graph
    outputs, weights = _outputs(graph), _weights(graph)
    renamed: dict[str, str] = {}
    kept: list[onnx.NodeProto] = []
    for node in graph.node:
        _rename(node, renamed)
        tensor = _constant(node, outputs)
        if tensor is not None:
            weights.add(node.output[0])
            graph.initializer.append(_named(model, tensor, node.output[0], main=main))
        elif _is_copy(node, outputs, weights):
            renamed[node.output[0]] = node.input[0]
        else:
            kept.append(node)
    refill(graph.node, kept)
    gone = weights | renamed.keys()
    refill(graph.value_info, [value for value in graph.value_info if value.name not in gone])


def _named(model: Model, tensor: onnx.TensorProto, name: str, *, main: bool) -> onnx.TensorProto:
    """An initializer with the data of a Constant, detached if it is large and of the main graph."""
    if main:
        return model.detached_tensor(name, numpy_helper.to_array(tensor))
    copy = onnx.TensorProto()
    copy.CopyFrom(tensor)
    copy.name = name
    return copy


def _rename(node: onnx.NodeProto, renamed: dict[str, str]) -> None:
    for index, name in enumerate(node.input):
        if name in renamed:
            node.input[index] = renamed[name]
    if renamed and holds_graphs(node):
        for old, new in renamed.items():
            rename_reads(node, old, new)


def _constant(node: onnx.NodeProto, outputs: set[str]) -> onnx.TensorProto | None:
    """The tensor of a Constant node, if it may be a weight; None if the node writes a graph output."""
    if node.op_type != "Constant" or len(node.attribute) != 1 or node.attribute[0].name != "value":
        return None
    is_lifted = _is_weight(node.attribute[0].t) and outputs.isdisjoint(node.output)
    return node.attribute[0].t if is_lifted else None


def _is_copy(node: onnx.NodeProto, outputs: set[str], weights: set[str]) -> bool:
    return node.op_type == "Identity" and node.input[0] in weights and outputs.isdisjoint(node.output)


def _is_weight(tensor: onnx.TensorProto) -> bool:
    return tensor.data_type in _WEIGHT_TYPES and math.prod(tensor.dims) > 1
