"""What `load` mends, and weights that exporters write as nodes.

TensorRT accepts what is mended; `onnx.checker` or ONNX Runtime refuse it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import count

import onnx
from onnx import numpy_helper

from rewriter.ir.model.graphs import (
    holds_graphs,
    reads,
    refill,
    rename_reads,
    subgraphs,
    topological,
    walk_graphs,
    walk_nodes,
)
from rewriter.ir.model.model import Model
from rewriter.ir.model.tensors import shape_of

NAMED = 3
"""Renamed nodes that a note lists."""


def mend(model: Model) -> tuple[str, ...]:
    """Sorts nodes, makes their names unique in each graph, and gives outputs the types and shapes they lack.

    Returns:
        A sentence for each thing that was changed.

    Raises:
        ModelError: the result of a node is computed from itself.
    """
    return (*_in_order(model), *_unique_names(model.proto), *_typed_outputs(model))


def _in_order(model: Model) -> Iterator[str]:
    """Sorts the nodes of all graphs and local functions: converters to FP16 append their Casts at the end."""
    graphs: list[onnx.GraphProto | onnx.FunctionProto] = [model.proto.graph, *model.proto.functions]
    early = sum(_sort(graph, str(model.path or "model")) for graph in graphs)
    if early:
        total = sum(1 for graph in graphs for _ in walk_nodes(graph))
        yield f"{early} of {total} nodes came before a node whose result they read: sorted"


def _sort(graph: onnx.GraphProto | onnx.FunctionProto, where: str) -> int:
    """Sorts a graph and its subgraphs; returns the number of nodes that came too early."""
    places = {name: place for place, node in enumerate(graph.node) for name in node.output}
    read = (map(places.get, reads(node)) for node in graph.node)
    early = sum(any(p is not None and p >= place for p in found) for place, found in enumerate(read))
    if early:
        producers = {name: node for node in graph.node for name in node.output}
        refill(graph.node, topological(graph.node, producers, where))
    return early + sum(_sort(body, where) for node in graph.node for body in subgraphs(node))


def _unique_names(proto: onnx.ModelProto) -> Iterator[str]:
    """Renames nodes whose name another node of the graph has: `conv`, `conv_1`, `conv_2`."""
    renamed = []
    for graph in walk_graphs(proto.graph):
        taken, seen = {node.name for node in graph.node}, {""}
        for node in graph.node:
            if node.name in seen and node.name:
                old = node.name
                node.name = next(new for n in count(1) if (new := f"{old}_{n}") not in taken)
                taken.add(node.name)
                renamed.append(f"{old} -> {node.name}")
            seen.add(node.name)
    if renamed:
        more = f", and {len(renamed) - NAMED} more" if len(renamed) > NAMED else ""
        yield (f"nodes had the name of another node, and were renamed: {', '.join(renamed[:NAMED])}{more}")


def _typed_outputs(model: Model) -> Iterator[str]:
    """Completes outputs by shape inference; what it does not know stays unknown."""
    outputs = {v.name: v for v in model.proto.graph.output if not _is_complete(v)}
    if not outputs:
        return
    found = {v.name: v for v in _inferred(model).output}
    for name, value in outputs.items():
        value.type.MergeFrom(found[name].type)
        tensor = value.type.tensor_type
        known = shape_of(tensor)
        if known is None:
            yield f"output {name!r} has no shape in the file, and inference finds none"
        else:
            text = "x".join("?" if size is None else str(size) for size in known) or "a scalar"
            yield f"output {name!r} has no shape in the file; by inference it is {text}"


def _is_complete(value: onnx.ValueInfoProto) -> bool:
    """True if a value has a type and, as a tensor, a shape."""
    if value.type.WhichOneof("value") is None:
        return False
    return not value.type.HasField("tensor_type") or value.type.tensor_type.HasField("shape")


def _inferred(model: Model) -> onnx.GraphProto:
    proto = model.weightless()
    try:
        return onnx.shape_inference.infer_shapes(proto, data_prop=True).graph
    except (onnx.shape_inference.InferenceError, ValueError, RuntimeError):
        return proto.graph  # the checker says what is wrong


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
