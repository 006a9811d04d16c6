"""A model whose plugins are not here, as two models: what runs without them, and the rest."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
from onnx import NodeProto, helper

from rewriter.ir.model.graphs import (
    RUNTIME_OPERATORS,
    STANDARD_DOMAINS,
    import_opsets,
    reads,
    rename_reads,
    replace_items,
    schema_of,
    walk_nodes,
)
from rewriter.ir.model.model import Model

RUNTIME_DOMAINS = ("com.microsoft", "ai.onnx", "com.ms.")
"""Beginnings of domains whose operators ONNX Runtime brings; onnx has no schemas of most."""


@dataclass(frozen=True)
class Split:
    """A model in two parts."""

    head: Model  # nodes that depend on no plugin; outputs: the model's, then those that the tail reads
    tail: Model  # the plugins and all nodes that depend on them
    plugins: tuple[NodeProto, ...]  # the plugin nodes of the main graph, in order
    outputs: tuple[str, ...]  # names of the model's outputs, in order
    path: Path | None

    def joined(self, head: Model, tail: Model) -> Model:
        """The whole model of two parts with the same operator sets, and Casts where their types differ."""
        model, graph = replace(head.copy(), path=self.path), tail.copy().proto.graph
        whole, between = model.proto.graph, {v.name for v in graph.input}
        types = {port.name: port.dtype for port in head.signature.outputs}
        for port in tail.signature.inputs:
            if types.get(port.name, port.dtype) != port.dtype:
                cast = f"{port.name}/plugin"
                whole.node.append(helper.make_node("Cast", [port.name], [cast], cast, to=port.dtype))
                for node in graph.node:
                    rename_reads(node, {port.name: cast})
        own = {t.name for t in whole.initializer}
        whole.node.extend(graph.node)
        whole.initializer.extend(t for t in graph.initializer if t.name not in own)
        known = {v.name for v in (*whole.value_info, *whole.input, *whole.output)}
        whole.value_info.extend(v for v in (*graph.value_info, *graph.output) if v.name not in known)
        ports = {v.name: v for v in (*graph.output, *whole.output)}
        inner = [v for v in whole.output if v.name in between and v.name not in self.outputs]
        whole.value_info.extend(inner)
        replace_items(whole.output, [ports[name] for name in self.outputs])
        import_opsets(model.proto, tail.proto)
        model.weights = tail.weights | model.weights
        model.mark_edited()
        return model


def _plugin_operators(model: Model) -> set[tuple[str, str]]:
    """Domains and names of operators of neither ONNX nor ONNX Runtime, and of no function of the model."""
    opsets, functions = model.opsets, {(f.domain, f.name) for f in model.proto.functions}
    return {
        (domain, op)
        for domain, op in {(node.domain, node.op_type) for node in model.proto.graph.node} - functions
        if not (domain in STANDARD_DOMAINS and op in RUNTIME_OPERATORS)
        and (domain in STANDARD_DOMAINS or not domain.startswith(RUNTIME_DOMAINS))
        and schema_of(op, domain, opsets.get("" if domain in STANDARD_DOMAINS else domain, 1)) is None
    }


def split_at_plugins(model: Model) -> Split | None:
    """Splits a model before the plugins of its main graph; None if nothing useful is before one."""
    graph, operators = model.proto.graph, _plugin_operators(model)
    plugins = [node for node in graph.node if (node.domain, node.op_type) in operators]
    if not plugins:
        return None
    ids, late = {id(node) for node in plugins}, set[str]()
    head, tail = list[NodeProto](), list[NodeProto]()
    for node in graph.node:
        behind = id(node) in ids or not late.isdisjoint(reads(node))
        (tail if behind else head).append(node)
        late.update(node.output if behind else ())
    made = {name for node in head for name in node.output if name}
    facts, outputs = model.facts().main, tuple(v.name for v in graph.output)
    between = [name for name in dict.fromkeys(n for node in tail for n in reads(node)) if name in made]
    known = [name for name in between if name in facts and facts[name].dtype]
    if not head or known != between or not (between or set(outputs) & made):
        return None
    ports = {v.name: v for v in graph.output}
    infos = [
        ports.get(name) or helper.make_tensor_value_info(name, facts[name].dtype, facts[name].shape)
        for name in between
    ]
    own = [v for v in graph.output if v.name not in late]
    first = _part(model, head, list(graph.input), [*own, *(v for v in infos if v.name not in ports)])
    read = {name for node in tail for name in reads(node)}
    inputs = [*infos, *(v for v in graph.input if v.name in read)]
    rest = _part(model, tail, inputs, [v for v in graph.output if v.name in late])
    return Split(first, rest, tuple(plugins), outputs, model.path)


def _part(
    model: Model,
    nodes: list[NodeProto],
    inputs: Iterable[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
) -> Model:
    """A copy of the model with some of its nodes, and the initializers that they read or that are outputs."""
    part = replace(model.copy(), path=None, files=())  # the file holds the whole
    graph = part.proto.graph
    names = {n for node in nodes for n in (*reads(node), *node.output)} | {v.name for v in outputs}
    inner = {n for node in nodes for n in node.output} - {v.name for v in outputs}
    replace_items(graph.node, nodes)
    replace_items(graph.initializer, [t for t in graph.initializer if t.name in names])
    replace_items(graph.value_info, [v for v in graph.value_info if v.name in inner])
    constants = {t.name for t in model.proto.graph.initializer}  # old exporters list them as inputs, too
    replace_items(graph.input, [v for v in inputs if v.name in names or v.name not in constants])
    replace_items(graph.output, outputs)
    used = {"", *(node.domain for node in walk_nodes(graph)), *(f.domain for f in part.proto.functions)}
    imports = [o for o in part.proto.opset_import if o.domain in used or o.domain in STANDARD_DOMAINS]
    replace_items(part.proto.opset_import, imports)
    part.weights = {name: array for name, array in model.weights.items() if name in names}
    part.mark_edited()
    return part
