"""Turns hazards into a plan: the FP32 nodes, with islands that share borders merged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from onnx import NodeProto, TensorProto

from rewriter.edits import GraphEditor, label, open_graphs
from rewriter.facts import FLOATS, Facts
from rewriter.hazards import CHEAP, RULES, Hazard, Settings, Survey
from rewriter.model import Model
from rewriter.plan import Decision, InputsOutputs, Plan, Precision, Range
from rewriter.stored import logical_name

LOW_TYPES: dict[Precision, int] = {
    "fp32": TensorProto.FLOAT,
    "fp16": TensorProto.FLOAT16,
    "bf16": TensorProto.BFLOAT16,
}


@dataclass(frozen=True)
class Wish:
    """What the user asked of the plan."""

    precision: Precision = "fp16"
    io: InputsOutputs = "keep"
    keep_nodes: tuple[str, ...] = ()
    keep_ops: tuple[str, ...] = ()


def node_key(scope: int, node: NodeProto) -> str:
    """Identifies a node in a model, before and after its types change.

    Made of the index of its scope (the order of `Facts.scopes`) and the logical name of its first output.
    """
    return f"{scope}:{logical_name(next((name for name in node.output if name), ''))}"


def make_plan(model: Model, facts: Facts, ranges: Mapping[tuple[int, str], Range], wish: Wish) -> Plan:
    """The plan that the rules of `hazards` give for `model` with its measured `ranges`.

    `ranges` is keyed by scope index and tensor name; what is missing counts as unmeasured.
    """
    if wish.precision == "fp32":
        return Plan("fp32", wish.io)
    settings = Settings(LOW_TYPES[wish.precision], wish.keep_nodes, wish.keep_ops)
    decisions: list[Decision] = []
    float_nodes = 0
    for survey in _surveys(model, facts, ranges, settings):
        float_nodes += len(survey.nodes)
        decisions.extend(_decide(survey))
    return Plan(wish.precision, wish.io, tuple(decisions), float_nodes)


def _surveys(
    model: Model, facts: Facts, ranges: Mapping[tuple[int, str], Range], settings: Settings
) -> Iterator[Survey]:
    opsets = {o.domain: o.version for o in model.proto.opset_import}
    opsets.setdefault("", opsets.get("ai.onnx", 1))
    graphs = open_graphs(model, facts)
    mixed = any(_computes_low(graph) for graph in graphs)
    made: dict[int, Survey] = {}
    for scope, graph in enumerate(graphs):
        parent = made.get(id(graph.parent)) if graph.parent is not None else None
        made[id(graph)] = survey = Survey(graph, scope, ranges, opsets, settings, mixed, parent)
        yield survey


def _computes_low(graph: GraphEditor) -> bool:
    low = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
    return any(
        graph.dtype(out) in low
        for node in graph.nodes
        if node.op_type not in {"Cast", "Constant"}
        for out in node.output
    )


def _decide(survey: Survey) -> list[Decision]:
    found: dict[int, Hazard] = {}
    for rule in RULES:
        for hazard in rule(survey):
            found.setdefault(id(hazard.node), hazard)
    _absorb(survey, found)
    return [_decision(survey.scope, found[id(node)]) for node in survey.nodes if id(node) in found]


def _absorb(survey: Survey, found: dict[int, Hazard]) -> None:
    """Take a cheap node into the island if all its float neighbours are in it: no Cast is left there."""
    queue = [node for node in survey.nodes if id(node) not in found]
    while queue:
        node = queue.pop()
        if id(node) in found or node.op_type not in CHEAP or not _surrounded(survey, node, found):
            continue
        found[id(node)] = Hazard(node, "between-islands", "all its neighbours are in FP32")
        queue.extend(n for n in _neighbours(survey, node) if id(n) not in found)


def _surrounded(survey: Survey, node: NodeProto, found: Mapping[int, Hazard]) -> bool:
    graph = survey.graph
    sources = [t for t in node.input if graph.dtype(t) in FLOATS and graph.constant(t) is None]
    producers = [graph.producer(t) for t in sources]
    consumers = [n for t in node.output for n in graph.consumers(t)]
    if not producers or not consumers or any(graph.is_output(t) for t in node.output):
        return False
    return all(p is not None and id(p) in found for p in producers) and all(id(n) in found for n in consumers)


def _neighbours(survey: Survey, node: NodeProto) -> Iterator[NodeProto]:
    for tensor in node.input:
        producer = survey.graph.producer(tensor)
        if producer is not None and survey.floats(producer):
            yield producer
    for tensor in node.output:
        yield from (n for n in survey.graph.consumers(tensor) if survey.floats(n))


def _decision(scope: int, hazard: Hazard) -> Decision:
    return Decision(
        label(hazard.node),
        hazard.node.op_type,
        node_key(scope, hazard.node),
        hazard.rule,
        hazard.reason,
        hazard.tensor,
        hazard.range,
    )
