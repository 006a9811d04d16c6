"""Models that nothing can be done about, and names that no node has, refused before anything is measured."""

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import onnx
from onnx import NodeProto, TensorProto

from rewriter.base.errors import LIKENESS, SLIP, UnbuildableError, UsageError, did_you_mean
from rewriter.ir.graph import display_name
from rewriter.ir.model import Model, walk_graphs, walk_nodes
from rewriter.ir.model.graphs import schema_of
from rewriter.ir.model.schemas import EXCHANGEABLE
from rewriter.ir.model.tensors import FLOATS, TensorFacts
from rewriter.ir.plan import IO_TYPES, InputsOutputs, PortTypes, io_parts, plugin_types
from rewriter.target import Target
from rewriter.target.operators import refused_in_model

LISTED = 3  # nodes that a refusal names, and names that it offers in place of one that fits nothing


def refuse_unknown_names(model: Model, patterns: Sequence[str], option: str = "keep-fp32") -> None:
    """Refuses patterns of an option that fit no node or output of the model.

    A pattern for a node that a pass adds below one of the model, such as `/mix/Split`, is not refused.
    """
    nodes = [node for g in walk_graphs(model.proto.graph) for node in g.node] if patterns else []
    names = {name for node in nodes for name in (node.name, *node.output)} - {""}
    for pattern in patterns:
        above = pattern.rpartition("/")[0]
        if not any(fnmatchcase(name, p) for p in (pattern, above) if p for name in names):
            hint = f"there are {near_names(pattern, map(display_name, nodes))}"
            raise UsageError(f"no node has the name {pattern!r}", option=option, hint=hint)


def refuse_unknown_operators(model: Model, names: Sequence[str], option: str) -> None:
    """Refuses slips of other names of operators; the model need not have the operator."""
    there = {node.op_type for node in walk_nodes(model.proto.graph)} if names else set[str]()
    for name in names:
        known = there | {schema.name for schema in onnx.defs.get_all_schemas()}
        like = [one for one in known if one[:1].lower() == name[:1].lower()]
        if name not in known and (hint := did_you_mean(name, like, SLIP)):
            raise UsageError(f"no operator has the name {name!r}", option=option, hint=hint)


def refuse_unknown_ports(model: Model, io: InputsOutputs) -> None:
    """Refuses patterns of `io` that fit no float input or output of the model, and lists these."""
    ports = (*model.signature.inputs, *model.signature.outputs)
    floats = [port.name for port in ports if port.dtype in EXCHANGEABLE]
    for pattern, _ in io_parts(io):
        if pattern and not any(fnmatchcase(name, pattern) for name in floats):
            hint = f"there are {near_names(pattern, floats)}"
            raise UsageError(f"no float input or output has the name {pattern!r}", option="io", hint=hint)


def declare_plugins(model: Model, texts: Iterable[str]) -> None:
    """Gives results of custom operators the types that the model lacks; UsageError: they do not fit it."""
    graphs, types = list(walk_graphs(model.proto.graph)), plugin_types(texts)
    nodes = [node for graph in graphs for node in graph.node]
    for op, ports in types.items():
        _refuse_ports(model, op, ports, nodes)
    names = {v.name for graph in graphs for v in (*graph.value_info, *graph.output)}
    for graph in graphs:
        for node in graph.node:
            outputs = types[node.op_type].outputs if node.op_type in types else ()
            for name, kind in zip(node.output, (*outputs, *outputs[-1:] * len(node.output)), strict=False):
                if name and name not in names:
                    dtype = TensorProto.DataType.Value("FLOAT" if kind in IO_TYPES else kind.upper())
                    graph.value_info.add(name=name).type.tensor_type.elem_type = dtype
    if types:
        model.mark_edited()
    for graph, scope in zip(graphs, model.facts().scopes if types else (), strict=False):
        for node in graph.node:
            if node.op_type in types:
                _refuse_kinds(node, types[node.op_type], scope)


def _refuse_kinds(node: NodeProto, ports: PortTypes, scope: Mapping[str, TensorFacts]) -> None:
    """Refuses a type other than the model's unless both are floats; one float type is for all floats."""
    for names, kinds in ((node.input, ports.inputs), (node.output, ports.outputs)):
        for name, kind in zip(names, kinds, strict=False):
            dtype = scope[name].dtype if name in scope else 0
            own = TensorProto.DataType.Name(dtype)
            fits = dtype in FLOATS or not kinds[1:] if kind in IO_TYPES else own == kind.upper()
            if dtype and not fits:
                what = f"{name} of {display_name(node)} is {own}, not {kind}"
                hint = "only floats can be exchanged for one another"
                raise UsageError(what, option="plugin-types", hint=hint)


def _refuse_ports(model: Model, op: str, ports: PortTypes, nodes: Sequence[NodeProto]) -> None:
    named = [node for node in nodes if node.op_type == op]
    what = hint = ""
    if not named:
        what, hint = f"the model has no {op}", f"there are {near_names(op, (n.op_type for n in nodes))}"
    elif schema_of(op, named[0].domain, model.opsets.get(named[0].domain, 1)) is not None:
        what, hint = f"{op} is an operator of ONNX", "`keep-fp32-op` or `lower-op` decides about it"
    else:
        sizes = max(len(n.input) for n in named), max(len(n.output) for n in named)
        if len(ports.inputs) > sizes[0] or len(ports.outputs) > sizes[1]:
            what = f"{op} has {sizes[0]} inputs and {sizes[1]} outputs"
            hint = f"{len(ports.inputs)} and {len(ports.outputs)} types are given"
    if what:
        raise UsageError(what, option="plugin-types", hint=hint)


def near_names(name: str, present: Iterable[str]) -> str:
    """Names that are like one that fits nothing, or else the first of them all; "" if there are none."""
    names = list(dict.fromkeys(present))
    core = name.strip("*/?[]").lower()
    alike = [name for name in names if core and core in name.lower()]
    parts = {part: name for name in reversed(names) for part in (*name.split("/"), name)}
    close = [parts[part] for part in difflib.get_close_matches(core, parts, LISTED, LIKENESS)]
    shown = alike or list(dict.fromkeys(close)) or names
    return ", ".join(shown[:LISTED]) + " ..." * (len(shown) > LISTED)


def refuse_unbuildable(model: Model, target: Target, plugins: Iterable[str]) -> None:
    """Refuses what the table of operators marks so: quantisation that no release builds."""
    hopeless = [refusal for refusal in refused_in_model(model, target, plugins) if refusal.row.at_once]
    if not hopeless:
        return
    row = hopeless[0].row
    nodes = [refusal.node for refusal in hopeless if refusal.row is row]
    operators = ", ".join(f"{count} {op}" for op, count in Counter(node.op_type for node in nodes).items())
    names = ", ".join(f"{display_name(node)} ({node.op_type})" for node in nodes[:LISTED])
    more = f", and {len(nodes) - LISTED} more" if len(nodes) > LISTED else ""
    raise UnbuildableError(
        f"it is {row.at_once} ({operators}), which TensorRT does not compute: {names}{more}",
        where=str(model.path) if model.path else "the model",
        hint=row.remedy,
    )
