"""Normalizes a model that TensorRT accepts and onnx.checker or ONNX Runtime refuses; lifts weights."""

import math
from collections.abc import Callable, Iterator

import numpy as np
import onnx
from onnx import numpy_helper

from rewriter.base.text import count as counted
from rewriter.ir.model.graphs import (
    STANDARD_DOMAINS,
    fresh_name,
    reads,
    rename_reads,
    replace_items,
    schema_of,
    subgraphs,
    topological,
    walk_graphs,
    walk_nodes,
)
from rewriter.ir.model.model import Model
from rewriter.ir.model.tensors import DETACH_BYTES

NAMED = 3  # renamed nodes that a note lists


def normalize(model: Model) -> tuple[str, ...]:
    """Sorts nodes, makes their names unique in each graph, writes Erfc as Erf, and completes outputs;
    sentences about what changed.

    Raises:
        ModelError: the result of a node is computed from itself.
    """
    return (*_in_order(model), *_unique_names(model.proto), *_without_erfc(model), *_typed_outputs(model))


def _in_order(model: Model) -> Iterator[str]:
    """Sorts the nodes of all graphs and local functions: converters to FP16 append their Casts at the end."""
    graphs: list[onnx.GraphProto | onnx.FunctionProto] = [model.proto.graph, *model.proto.functions]
    early = sum(_sort(graph, str(model.path or "model")) for graph in graphs)
    if early:
        total = sum(1 for graph in graphs for _ in walk_nodes(graph))
        yield f"{early} of {total} nodes came before a node whose result they read: sorted"


def _sort(graph: onnx.GraphProto | onnx.FunctionProto, where: str) -> int:
    """Sorts a graph and its subgraphs; returns the number of nodes that came too early."""
    positions = {name: index for index, node in enumerate(graph.node) for name in node.output}
    read = (map(positions.get, reads(node)) for node in graph.node)
    early = sum(any(p is not None and p >= index for p in found) for index, found in enumerate(read))
    if early:
        producers = {name: node for node in graph.node for name in node.output}
        replace_items(graph.node, topological(graph.node, producers, where))
    return early + sum(_sort(body, where) for node in graph.node for body in subgraphs(node))


def _unique_names(proto: onnx.ModelProto) -> Iterator[str]:
    """Renames nodes whose name another node of the graph has: `conv`, `conv_1`, `conv_2`."""
    renamed = []
    for graph in walk_graphs(proto.graph):
        taken, seen = {node.name for node in graph.node}, {""}
        for node in graph.node:
            if node.name in seen and node.name:
                old = node.name
                node.name = fresh_name(old, taken)
                renamed.append(f"{old} -> {node.name}")
            seen.add(node.name)
    if renamed:
        more = f", and {len(renamed) - NAMED} more" if len(renamed) > NAMED else ""
        yield (f"nodes had the name of another node, and were renamed: {', '.join(renamed[:NAMED])}{more}")


LEAST_ERF = 9  # the operator set that added Erf


def _without_erfc(model: Model) -> Iterator[str]:
    """Writes Erfc(x) as 1 - Erf(x): tf2onnx leaves Keras' GELU with this operator, which ONNX lacks."""
    graphs = list(walk_graphs(model.proto.graph))
    erfcs = [[node for node in graph.node if _is_erfc(model, node)] for graph in graphs]
    if not (total := sum(map(len, erfcs))):
        return
    for node in (node for found in erfcs for node in found):
        node.op_type = "Erf"  # of the same type: inference then knows what follows, too
    model.mark_edited()
    taken = {name for graph in graphs for node in graph.node for name in (*node.input, *node.output)}
    scopes = list(zip(graphs, erfcs, model.facts().scopes, strict=True))
    for graph, found, facts in reversed(scopes):  # inner graphs first: an outer one copies them
        types = {id(node): facts[name].dtype if (name := node.output[0]) in facts else 0 for node in found}
        nodes = []
        for node in graph.node:
            added = _complement(node, types[id(node)], taken) if id(node) in types else []
            nodes += [node, *added]
        replace_items(graph.node, nodes)
    yield f"ONNX has no Erfc: {counted(total, 'node')} became 1 - Erf(x)"


def _is_erfc(model: Model, node: onnx.NodeProto) -> bool:
    if node.op_type != "Erfc" or node.domain not in STANDARD_DOMAINS or len(node.input) != 1:
        return False
    own = any(function.name == "Erfc" for function in model.proto.functions)
    return not own and model.opset >= LEAST_ERF and schema_of("Erfc", "", model.opset) is None


def _complement(node: onnx.NodeProto, dtype: int, taken: set[str]) -> list[onnx.NodeProto]:
    """The nodes that subtract the result of a node from 1, and take over its name."""
    result = node.output[0]
    node.output[0] = fresh_name(f"{result}/erf", taken)
    one = fresh_name(f"{result}/one", taken)
    value = np.ones((), onnx.helper.tensor_dtype_to_np_dtype(dtype or onnx.TensorProto.FLOAT))
    return [
        onnx.helper.make_node("Constant", [], [one], value=numpy_helper.from_array(value)),
        onnx.helper.make_node("Sub", [one, node.output[0]], [result]),
    ]


def _typed_outputs(model: Model) -> Iterator[str]:
    """Completes outputs by shape inference; what it does not know stays unknown."""
    outputs = [v for v in model.proto.graph.output if not _is_complete(v)]
    types = model.facts().main if outputs else {}
    for value in outputs:
        facts = types.get(value.name)
        if facts is not None:
            value.type.CopyFrom(onnx.helper.make_tensor_type_proto(facts.dtype, facts.shape))
        if facts is None or facts.shape is None:
            yield f"output {value.name!r} has no shape in the file, and inference finds none"
        else:
            text = "x".join("?" if size is None else str(size) for size in facts.shape) or "a scalar"
            yield f"output {value.name!r} has no shape in the file; by inference it is {text}"


def _is_complete(value: onnx.ValueInfoProto) -> bool:
    """True if a value has a type and, as a tensor, a shape."""
    if value.type.WhichOneof("value") is None:
        return False
    return not value.type.HasField("tensor_type") or value.type.tensor_type.HasField("shape")


LEAST_IR = 4  # before IR 4, every initializer had to be listed as an input

_WEIGHT_TYPES = frozenset(
    getattr(onnx.TensorProto, name) for name in "FLOAT FLOAT16 BFLOAT16 DOUBLE INT8 UINT8".split()
)


def lift_weights(model: Model) -> None:
    """Makes initializers of weights in Constants, in place, and removes Identities of weights.

    PaddlePaddle and torch.jit write Constants. Shapes, axes and single numbers stay as they are, and so do
    Constants and Identities that write a graph output, and bodies of functions, which have no initializers.
    """
    nodes = walk_nodes(model.proto.graph)
    if not any(node.op_type == "Identity" or _constant(node, _is_weight) is not None for node in nodes):
        return
    facts = model.facts()
    if sum(_lift(model, graph, _is_weight) for graph in walk_graphs(model.proto.graph)):
        model.proto.ir_version = max(model.proto.ir_version, LEAST_IR)
        model.mark_edited()
        model.set_facts(facts)


def lift_large_constants(model: Model) -> None:
    """Makes large Constants of the main graph weights, whose data no pass copies."""
    _lift(model, model.proto.graph, lambda tensor: tensor.ByteSize() >= DETACH_BYTES)
    model.mark_edited()


def _lift(model: Model, graph: onnx.GraphProto, is_weight: Callable[[onnx.TensorProto], bool]) -> int:
    """Lifts the weights of one graph; returns the number of nodes that are gone."""
    inputs, outputs = ({value.name for value in values} for values in (graph.input, graph.output))
    # an input with a default is no weight: callers may replace it
    weights = {t.name for t in graph.initializer if is_weight(t) and t.name not in inputs}
    renamed: dict[str, str] = {}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if renamed:
            rename_reads(node, renamed)
        tensor = _constant(node, is_weight)
        if not outputs.isdisjoint(node.output):
            nodes.append(node)
        elif tensor is not None:
            weights.add(node.output[0])
            value, main = numpy_helper.to_array(tensor), graph is model.proto.graph
            graph.initializer.append(model.detached_tensor(node.output[0], value, main=main))
        elif node.op_type == "Identity" and node.input[0] in weights:
            renamed[node.output[0]] = node.input[0]
        else:
            nodes.append(node)
    gone = len(graph.node) - len(nodes)
    if gone:
        lifted = weights | renamed.keys()
        replace_items(graph.node, nodes)
        replace_items(graph.value_info, [value for value in graph.value_info if value.name not in lifted])
    return gone


def _constant(node: onnx.NodeProto, is_weight: Callable[[onnx.TensorProto], bool]) -> onnx.TensorProto | None:
    """The tensor of a Constant node, if it may be a weight."""
    if node.op_type != "Constant" or len(node.attribute) != 1 or node.attribute[0].name != "value":
        return None
    return node.attribute[0].t if is_weight(node.attribute[0].t) else None


def _is_weight(tensor: onnx.TensorProto) -> bool:
    return tensor.data_type in _WEIGHT_TYPES and math.prod(tensor.dims) > 1
