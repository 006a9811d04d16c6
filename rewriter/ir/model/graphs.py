"""Walks over graphs and subgraphs, and operators that onnx does not know."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import starmap
from operator import is_
from typing import Any

import onnx

from rewriter.base.errors import ModelError

STANDARD_DOMAINS = frozenset({"", "ai.onnx"})  # both name the operator set of ONNX itself

UNKNOWN_DOMAIN = "rewriter.unknown"

RUNTIME_OPERATORS = frozenset({"LayerNormalization", "SimplifiedLayerNormalization"})
"""Operators that ONNX Runtime's optimizer writes into ONNX's own domain, and runs, at any operator set."""


def walk_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """`graph` and all its subgraphs, outer ones first."""
    yield graph
    for node in holders(graph):
        for child in subgraphs(node):
            yield from walk_graphs(child)


def holders(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """The nodes of a graph that hold graphs; most graphs have none, which their few operators show."""
    kinds = {(node.op_type, node.domain) for node in graph.node}
    return list(filter(holds_graphs, graph.node)) if any(starmap(_may_hold_graphs, kinds)) else []


def all_graphs(proto: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    """The main graph and its subgraphs, as `walk_graphs`, then the subgraphs in local functions."""
    yield from walk_graphs(proto.graph)
    for node in (node for function in proto.functions for node in function.node):
        for child in subgraphs(node):
            yield from walk_graphs(child)


def walk_nodes(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.NodeProto]:
    """The nodes of a graph or function and of all subgraphs; a node comes before those that it holds."""
    for node in graph.node:
        yield node
        for child in subgraphs(node):
            yield from walk_nodes(child)


def subgraphs(node: onnx.NodeProto) -> Sequence[onnx.GraphProto]:
    """The graphs that a node holds as attributes (If, Loop, Scan, SequenceMap)."""
    if not _may_hold_graphs(node.op_type, node.domain):
        return ()  # reading the attributes of every node would dominate the time of all walks
    kinds = onnx.AttributeProto
    single = [a.g for a in node.attribute if a.type == kinds.GRAPH]
    return [*single, *(g for a in node.attribute if a.type == kinds.GRAPHS for g in a.graphs)]


def replace_items(field: Any, messages: Iterable[Any]) -> None:
    """Replaces the content of a repeated field by copies of `messages`, unless that is what it holds."""
    items = list(messages)  # held: messages that leave the field live as long as someone has them
    if len(items) != len(field) or not all(map(is_, items, field)):
        del field[:]
        field.extend(items)


def holds_graphs(node: onnx.NodeProto) -> bool:
    return bool(subgraphs(node))


@lru_cache(maxsize=4096)
def _may_hold_graphs(op_type: str, domain: str) -> bool:
    if not onnx.defs.has(op_type, domain):
        return True
    kinds = onnx.defs.OpSchema.AttrType
    attributes = onnx.defs.get_schema(op_type, domain=domain).attributes.values()
    return any(a.type in (kinds.GRAPH, kinds.GRAPHS) for a in attributes)


@lru_cache(maxsize=4096)
def schema_of(op_type: str, domain: str, opset: int) -> onnx.defs.OpSchema | None:
    """The schema of an operator at a version of its operator set; None if onnx has none."""
    try:
        return onnx.defs.get_schema(op_type, opset, "" if domain in STANDARD_DOMAINS else domain)
    except onnx.defs.SchemaError:
        return None


def weights_as_inputs(proto: onnx.ModelProto, weights: Container[str]) -> None:
    """Makes initializers inputs of the graph, in place."""
    graph = proto.graph
    listed = {v.name for v in graph.input}
    type_of = cache(onnx.helper.make_tensor_type_proto)  # most weights of a graph have one of few types
    for tensor in graph.initializer:
        if tensor.name in weights and tensor.name not in listed:
            graph.input.add(name=tensor.name, type=type_of(tensor.data_type, tuple(tensor.dims)))
    replace_items(graph.initializer, [t for t in graph.initializer if t.name not in weights])


def isolate_unknown_ops(proto: onnx.ModelProto) -> list[onnx.NodeProto]:
    """Moves nodes whose operator has no schema at the model's opset to a domain that onnx ignores.

    Returns:
        The nodes that are deprecated at that opset (GroupNormalization at 18).
    """
    opset = next((o.version for o in proto.opset_import if o.domain in STANDARD_DOMAINS), 0)
    local, deprecated = {(f.domain, f.name) for f in proto.functions}, list[onnx.NodeProto]()
    for node in walk_nodes(proto.graph) if opset else ():
        if node.domain in STANDARD_DOMAINS and (node.domain, node.op_type) not in local:
            schema = schema_of(node.op_type, "", opset)
            if schema is None:
                node.domain = UNKNOWN_DOMAIN
            elif schema.deprecated:
                deprecated.append(node)
    proto.opset_import.add(domain=UNKNOWN_DOMAIN, version=1)
    return deprecated


def import_opsets(proto: onnx.ModelProto, other: onnx.ModelProto) -> None:
    """Adds the operator sets of another model whose domains `proto` does not import."""
    domains = {o.domain for o in proto.opset_import}
    proto.opset_import.extend(o for o in other.opset_import if o.domain not in domains)


def fresh_name(base: str, taken: set[str], mark: str = "_") -> str:
    """A name made of `base`, `mark` and a number that is not in `taken`; it is added there."""
    name, count = base, 0
    while name in taken:
        count += 1
        name = f"{base}{mark}{count}"
    taken.add(name)
    return name


def captured(node: onnx.NodeProto) -> set[str]:
    """Names of outer tensors that a node's subgraphs read."""
    return set().union(*(_free_names(g) for g in subgraphs(node)))


def _free_names(graph: onnx.GraphProto) -> set[str]:
    bound = {v.name for v in graph.input} | {t.name for t in graph.initializer}
    bound.update(name for node in graph.node for name in node.output)
    free = {name for node in graph.node for name in reads(node)}
    return (free | {v.name for v in graph.output}) - bound


def reads(node: onnx.NodeProto) -> dict[str, None]:
    """Tensors that a node reads, itself or in its subgraphs, each once, in order."""
    reads = dict.fromkeys(filter(None, node.input))
    if _may_hold_graphs(node.op_type, node.domain):
        reads.update(dict.fromkeys(sorted(captured(node))))
    return reads


def topological(
    nodes: Iterable[onnx.NodeProto], producer: Mapping[str, onnx.NodeProto], where: str = "the graph"
) -> list[onnx.NodeProto]:
    """The nodes, in a stable order with producers first; a ModelError for a circle in the graph `where`."""
    order: list[onnx.NodeProto] = []
    done: set[int] = set()
    waited: set[int] = set()
    stack = list(nodes)[::-1]
    while stack:
        node = stack[-1]
        sources = () if id(node) in done else filter(None, map(producer.get, reads(node)))
        waiting = [source for source in sources if id(source) not in done]
        if not waiting:
            stack.pop()
            if id(node) not in done:
                done.add(id(node))
                order.append(node)
        elif id(node) in waited:
            what = f"its result is computed from itself, through {waiting[0].name or waiting[0].op_type!r}"
            hint = "export the model again: a graph has no cycles"
            raise ModelError(what, where=f"{where}: node {node.name or node.op_type!r}", hint=hint)
        else:
            waited.add(id(node))
            stack.extend(reversed(waiting))
    return order


def rename_reads(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    """Lets a node and its subgraphs read other tensors: the new names by the old ones, which may swap."""
    for index, name in enumerate(node.input):
        if name in names:
            node.input[index] = names[name]
    for graph in subgraphs(node) if _may_hold_graphs(node.op_type, node.domain) else ():
        own = {v.name for v in graph.input} | {t.name for t in graph.initializer}
        own.update(name for inner in graph.node for name in inner.output)
        outer = {old: new for old, new in names.items() if old not in own}
        for inner in graph.node:
            rename_reads(inner, outer)
        for value in graph.output:  # it may be an outer tensor itself
            value.name = outer.get(value.name, value.name)


def rename_tensors(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    """`rename_reads`, and the node's results by the same names."""
    rename_reads(node, names)
    for index, name in enumerate(node.output):
        node.output[index] = names.get(name, name)
