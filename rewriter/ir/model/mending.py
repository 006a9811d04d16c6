"""What TensorRT accepts, and `onnx.checker` or ONNX Runtime refuse: mended, and reported."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import onnx

from rewriter.ir.model.graphs import reads, refill, subgraphs, topological, walk_graphs, walk_nodes
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
