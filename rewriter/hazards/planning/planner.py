"""Turns hazards into a plan, with islands that share a border merged, and fits saved plans to a model."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain

from rewriter.base.errors import UsageError, did_you_mean
from rewriter.hazards import RULES, Hazard
from rewriter.hazards.analysis import LARGEST, LOW_TYPES, GraphAnalysis, PrecisionRequest
from rewriter.hazards.norms import fits_inside
from rewriter.hazards.planning import free_fp32
from rewriter.hazards.planning.islands import BETWEEN, absorb, grow, keep_adjacent, reach_outputs
from rewriter.hazards.target_rules import lowered_for_defects
from rewriter.hazards.types import NO_LOWER_TYPE
from rewriter.ir.graph import display_name, open_graphs
from rewriter.ir.model import Model
from rewriter.ir.model.schemas import logical_name, type_rules
from rewriter.ir.plan import SEARCHED, Decision, NodePatterns, Plan, Range, node_key

RangesByTensor = Mapping[tuple[int, str], Range]  # ranges by scope index and tensor name


def make_plan(model: Model, ranges: RangesByTensor, request: PrecisionRequest, *, real: bool = False) -> Plan:
    """The plan that the rules of `hazards` give for `model` with its measured `ranges`.

    Args:
        ranges: By scope index and tensor name; a missing tensor counts as unmeasured.
        real: True if they were measured on the user's data, so that they decide about decomposed norms.
    """
    if request.precision == "fp32":
        return Plan("fp32", request.io)
    every = list(analyses(model, ranges, replace(request, measured_norms=real)))
    decisions = tuple(decision for analysis in every for decision in _decide(analysis))
    in_range = frozenset(tensor for analysis in every for tensor in _in_range(analysis))
    nodes, types = sum(len(analysis.nodes) for analysis in every), request.plugin_types
    return Plan(request.precision, request.io, decisions, nodes, in_range, plugin_types=types)


def _in_range(analysis: GraphAnalysis) -> Iterator[str]:
    """The reductions of norms whose squares were measured to be in range, unless another norm shares them."""
    inside = {True: set[int](), False: set[int]()}
    for norm in analysis.norms:
        inside[fits_inside(analysis, norm)].update(id(node) for node in norm.nodes)
    if inside[True]:
        for node in analysis.nodes:
            if node.op_type.startswith(("Reduce", "Global")) and id(node) not in inside[False]:
                yield logical_name(node.output[0])


def extend_plan(
    model: Model, plan: Plan, extra: Mapping[str, str], released: frozenset[str] = frozenset()
) -> Plan:
    """`plan` with the nodes of `extra` (reasons by key) in FP32, without the `released`; islands merge."""
    if not extra and not released:
        return plan
    left = [d for d in plan.decisions if not released or (d.key not in released and d.rule != BETWEEN)]
    by_key = {d.key: d for d in left}
    decisions: list[Decision] = []
    for analysis in analyses(model, {}, PrecisionRequest(plan.precision, plan.io)):
        hazards: dict[int, Hazard] = {}
        for node in analysis.nodes:
            key = node_key(analysis.scope, node)
            if key in by_key or key in extra:
                hazards[id(node)] = Hazard(node, SEARCHED, extra.get(key, ""))
        keep_adjacent(analysis, hazards)
        absorb(analysis, hazards)
        reach_outputs(analysis, hazards)
        decisions += _decisions(analysis, hazards)
    return replace(plan, decisions=tuple(by_key.get(d.key, d) for d in decisions))


def unscaled_overflows(plan: Plan, ranges: RangesByTensor) -> dict[tuple[int, str], Range]:
    """The ranges that tensors out of range had before `rescale`; `ranges` were measured after it."""
    if plan.precision == "fp32":
        return {}
    largest = LARGEST[LOW_TYPES[plan.precision]]
    tensors = (((scope, tensor), exponent) for scope, tensor, exponent in plan.exponents)
    before = {key: ranges[key].scaled(-exponent) for key, exponent in tensors if key in ranges}
    return {key: range_ for key, range_ in before.items() if range_.reach > largest}


def analyses(
    model: Model, ranges: RangesByTensor, settings: PrecisionRequest, *, tag: str = ""
) -> Iterator[GraphAnalysis]:
    """The analysis of every graph of the model, in the order of `Facts.scopes`; `tag` is for edits."""
    graphs = open_graphs(model, tag=tag)
    computing = ((g, n) for g in graphs for n in g.nodes if n.op_type not in {"Cast", "Constant"})
    mixed = any(graph.dtype(out) in LARGEST for graph, node in computing for out in node.output)
    by_scope: dict[int, GraphAnalysis] = {}
    for scope, graph in enumerate(graphs):
        parent = by_scope.get(id(graph.parent)) if graph.parent is not None else None
        by_scope[id(graph)] = analysis = GraphAnalysis(
            graph, model.opsets, settings.low, scope, ranges, settings, mixed, parent
        )
        yield analysis


def _decisions(analysis: GraphAnalysis, by_node: Mapping[int, Hazard]) -> list[Decision]:
    hazards = ((n, by_node[id(n)], node_key(analysis.scope, n)) for n in analysis.nodes if id(n) in by_node)
    return [
        Decision(
            display_name(n), n.op_type, key, h.kind, h.reason, h.tensor, h.range, norm=h.norm, about=h.about
        )
        for n, h, key in hazards
    ]


def _decide(analysis: GraphAnalysis) -> list[Decision]:
    request = analysis.request
    by_node: dict[int, Hazard] = {}

    def add(hazards: Iterable[Hazard]) -> None:
        for hazard in hazards:
            by_node.setdefault(id(hazard.node), hazard)

    add(chain.from_iterable(rule(analysis) for rule in request.rules))
    add(hazard for rule in RULES for hazard in rule(analysis) if hazard.acted_on)
    add(free_fp32.dot_products(analysis))
    if request.epilogues == "all":
        add(free_fp32.epilogues(analysis, by_node.keys()))
        add(free_fp32.norms(analysis, by_node.keys()))
    keep_adjacent(analysis, by_node)
    grow(analysis, by_node)
    if request.epilogues == "all":
        add(
            free_fp32.norms(analysis, by_node.keys())
        )  # again: `grow` may have added the sums that norms read
        # after `grow`, which would add masks to the island and break the fused kernel
        add(free_fp32.softmaxes(analysis))
    absorb(analysis, by_node)
    # after islands have grown: with its neighbours in FP32, none of it would be free
    if request.epilogues == "own":
        add(free_fp32.own_epilogues(analysis, by_node.keys()))
    add(free_fp32.rounded_reciprocals(analysis))
    reach_outputs(analysis, by_node)
    for identity, hazard in list(by_node.items()):
        if hazard.kind not in NO_LOWER_TYPE and any(request.lower.requests(hazard.node)):
            del by_node[identity]
    for identity in lowered_for_defects(analysis):
        if identity in by_node and by_node[identity].kind in free_fp32.FREE:
            del by_node[identity]
    return _decisions(analysis, by_node)


SAME_MODEL = (
    "a plan fits the model that it was saved for, with the same `passes`, `skip`, `opset` and `target`; "
    "save a new one with `save-plan`"
)


def kept_by_user(plan: Plan) -> NodePatterns:
    """The nodes that a plan keeps for the user; passes before the plan must leave them unchanged again."""
    named = (d for d in plan.decisions if d.rule == "user")
    pairs = ((name, d.op) for d in named for name in (d.node, d.key.partition(":")[2]) if name)
    return NodePatterns(planned=frozenset(pairs))


def fit(model: Model, plan: Plan, where: str = "the plan") -> Plan:
    """`plan` as it applies to `model`: exactly its nodes in FP32 and BF16, in the model's order.

    Args:
        model: The input of the precision pass: the model after the structural passes.
        where: The plan's file, for messages.

    Raises:
        UsageError: a node of the plan is not in the model, has another operator there, shares its name with
            others, or has no BF16; or the plan is for another number of float nodes.
    """
    request = PrecisionRequest(plan.precision, plan.io)
    nodes = {node_key(s.scope, n): n for s in analyses(model, {}, request) for n in s.nodes}
    names: dict[str, list[str]] = {}
    for key, node in nodes.items():
        names.setdefault(display_name(node), []).append(key)
    decisions: dict[str, Decision] = {}
    for decision in plan.decisions:
        keys = [decision.key] if decision.key else names.get(decision.node, [])
        name, text, hint = decision.node or decision.key, "", SAME_MODEL
        named = nodes.get(keys[0]) if keys else None
        if len(keys) > 1:
            text, hint = f"{len(keys)} nodes are called {name}", f'give its "key": {", ".join(keys)}'
        elif named is None:
            key = f" (key {decision.key})" if decision.key and decision.node else ""
            text = f"the model has no float node {name}{key}"
            near = did_you_mean(decision.key or decision.node, nodes if decision.key else names)
            hint = f"{near} Otherwise: {SAME_MODEL}" if near else SAME_MODEL
        elif decision.op not in ("", named.op_type):
            text = f"{name} is {decision.op} in the plan and {named.op_type} in the model"
        elif decision.repair == "bf16" and not (
            (rules := type_rules(named, model.opsets, LOW_TYPES["bf16"])) and rules.can_follow
        ):
            text = f"{display_name(named)}: {named.op_type} has no BF16 in this opset"
            hint = "put it under fp32, or give a higher `opset`: Conv has BF16 from 22 on"
        if text or named is None:
            raise UsageError(text, where=where, hint=hint)
        decisions.setdefault(
            keys[0], replace(decision, node=display_name(named), op=named.op_type, key=keys[0])
        )
    if plan.float_nodes not in (0, len(nodes)):
        text = f"it is of a model with {plan.float_nodes} float nodes, and this one has {len(nodes)}"
        raise UsageError(text, where=where, hint=SAME_MODEL)
    ordered = tuple(decisions[key] for key in nodes if key in decisions)
    return replace(plan, decisions=ordered, float_nodes=len(nodes))
