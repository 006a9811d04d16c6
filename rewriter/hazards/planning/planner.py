"""Turns hazards into a plan, with FP32 islands that merge and grow, and fits saved plans to a model.

Islands merge where they meet, and grow over residual sums if that needs no more Casts: norms in FP32 read the
residual stream, which is then no longer rounded once per layer (docs/accuracy.md#residual-streams).
"""

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import chain

from onnx import NodeProto

from rewriter.base.errors import UsageError, did_you_mean
from rewriter.hazards import RULES, Hazard
from rewriter.hazards.analysis import LARGEST, LOW_TYPES, GraphAnalysis, PrecisionRequest
from rewriter.hazards.norms import fits_inside
from rewriter.hazards.planning import free_fp32
from rewriter.hazards.target_rules import lowered_for_defects
from rewriter.hazards.types import NO_LOWER_TYPE
from rewriter.ir.graph import display_name, open_graphs
from rewriter.ir.graph.ops import CHEAP, LAYOUTS, SUMS, VIEWS
from rewriter.ir.model import Model
from rewriter.ir.model.schemas import type_rules
from rewriter.ir.plan import SEARCHED, Decision, NodePatterns, Plan, Range, logical_name, node_key

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
        # again: `grow` may have added the sums that norms read
        add(free_fp32.norms(analysis, by_node.keys()))
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
        fitted = replace(decision, node=display_name(named), op=named.op_type, key=keys[0])
        decisions.setdefault(keys[0], fitted)
    if plan.float_nodes not in (0, len(nodes)):
        text = f"it is of a model with {plan.float_nodes} float nodes, and this one has {len(nodes)}"
        raise UsageError(text, where=where, hint=SAME_MODEL)
    ordered = tuple(decisions[key] for key in nodes if key in decisions)
    return replace(plan, decisions=ordered, float_nodes=len(nodes))


RESIDUAL = "residual-sum"

BETWEEN = "between-islands"  # rule of a node that is FP32 only because its neighbours are


def grow(analysis: GraphAnalysis, hazards: dict[int, Hazard]) -> None:
    """Add to `hazards`, hazards by the identity of their nodes, the sums that need no more Casts.

    Sums that feed one another are added together or not at all.
    """
    for stream in _streams(analysis, hazards):
        names = (analysis.source(t) for node in stream for t in (*node.input, *node.output))
        tensors = [t for t in dict.fromkeys(names) if not analysis.is_constant(t)]
        identities = hazards.keys()
        grown = identities | {id(node) for node in stream}
        before, after = (sum(_is_cast(analysis, t, fp32) for t in tensors) for fp32 in (identities, grown))
        if 0 < after <= before:
            reason = "the FP32 nodes around it need as many Casts without it"
            hazards.update((id(node), Hazard(node, RESIDUAL, reason)) for node in stream)


def _streams(analysis: GraphAnalysis, hazards: dict[int, Hazard]) -> list[list[NodeProto]]:
    """The sums without a hazard, grouped by streams: sums that feed one another."""
    streams: dict[int, list[NodeProto]] = {}
    fp32 = set(hazards)
    for node in analysis.nodes:
        if id(node) in hazards:
            continue
        if _begins_stream(analysis, node, fp32):
            fp32.add(id(node))
        elif node.op_type not in SUMS or sum(not analysis.is_constant(t) for t in node.input) < 2:
            continue  # it adds no two computed tensors
        own = streams[id(node)] = [node]
        for producer in map(analysis.producer, node.input):
            fed = streams.get(id(producer), own)
            if fed is not own:
                own, joining = (fed, own) if len(fed) >= len(own) else (own, fed)
                own.extend(joining)
                streams.update(dict.fromkeys(map(id, joining), own))
    return list({id(stream): stream for stream in streams.values()}.values())


def _begins_stream(analysis: GraphAnalysis, node: NodeProto, fp32: AbstractSet[int]) -> bool:
    """True if the node adds a constant (positions) to the rows of a table, or to an FP32 tensor.

    A constant added to a product is a bias, and one added to scores a mask: neither begins a stream.
    """
    computed = [t for t in node.input if not analysis.is_constant(t)]
    if node.op_type != "Add" or len(computed) != 1 or analysis.producer(computed[0]) is None:
        return False
    views = list(analysis.upstream(computed[0], lambda n: n.op_type in VIEWS))
    read = (t for n in views for t in n.input if analysis.is_float(t) and not analysis.is_constant(t))
    sources = map(analysis.producer, (computed[0], *read))
    return all(n is not None and (n.op_type in VIEWS or id(n) in fp32) for n in sources)


def _is_cast(analysis: GraphAnalysis, tensor: str, fp32: AbstractSet[int]) -> bool:
    """True if a reader of the tensor needs another type than its producer computes."""
    producer = analysis.producer(tensor)
    is_fp32 = id(producer) in fp32 if producer is not None else analysis.stays_fp32(tensor)
    wanted = {id(reader) in fp32 for _, reader in analysis.readers(tensor)}
    wanted |= {analysis.stays_fp32(t) for t in analysis.aliases(tensor) if analysis.graph.is_output(t)}
    return (not is_fp32) in wanted


def keep_adjacent(analysis: GraphAnalysis, hazards: dict[int, Hazard]) -> None:
    """Give Q/DQ nodes and their operators one type: TensorRT does not fuse them across a Cast."""
    partners: dict[int, list[NodeProto]] = {}
    for node, other in _quantized_pairs(analysis):
        partners.setdefault(id(node), []).append(other)
        partners.setdefault(id(other), []).append(node)
    queue = [hazard.node for hazard in hazards.values()]
    while queue:
        node = queue.pop()
        for other in partners.get(id(node), ()):
            if id(other) not in hazards:
                reason = f"next to {display_name(node)}, with no Cast between"
                hazards[id(other)] = Hazard(other, "quantized", reason)
                queue.append(other)


def _quantized_pairs(analysis: GraphAnalysis) -> Iterator[tuple[NodeProto, NodeProto]]:
    """Pairs of DequantizeLinear and a reader, through views, and of QuantizeLinear and its producer."""
    for node in analysis.nodes:
        if node.op_type == "DequantizeLinear":
            pairs = analysis.downstream(node.output[0], lambda n: n.op_type in VIEWS)
            yield from ((node, reader) for _, reader in pairs)
        elif node.op_type == "QuantizeLinear" and (producer := analysis.producer(node.input[0])) is not None:
            yield node, producer


def absorb(analysis: GraphAnalysis, hazards: dict[int, Hazard]) -> None:
    """Add cheap nodes that have only FP32 around them to the island: two borders become none."""
    for node in analysis.nodes:  # once: a neighbour of one that is absorbed was FP32 before
        if id(node) not in hazards and node.op_type in CHEAP and _surrounded(analysis, node, hazards):
            hazards[id(node)] = Hazard(node, BETWEEN, "all its neighbours are in FP32")


def reach_outputs(analysis: GraphAnalysis, hazards: dict[int, Hazard]) -> None:
    """Add the views between an FP32 node and an FP32 output of the model.

    Rounded to FP16 and back before an output, an FP32 sum was wrong by a factor of 46 in a ResNetV2 on
    TensorRT-RTX 1.6.1 (the row `cast-round-trip-output` of quirks.toml), and it is pointless.
    """
    for port in analysis.graph.graph.output if analysis.graph.is_main else ():
        views, node = list[NodeProto](), analysis.producer(port.name)
        while node is not None and node.op_type in LAYOUTS and id(node) not in hazards:
            views.append(node)
            node = analysis.producer(node.input[0])
        alone = all(len([*analysis.readers(v.output[0])]) == (v is not views[0]) for v in views)
        if alone and analysis.stays_fp32(port.name) and id(node) in hazards:
            hazards.update((id(view), Hazard(view, BETWEEN, "between FP32 and an output")) for view in views)


def _surrounded(analysis: GraphAnalysis, node: NodeProto, hazards: Mapping[int, Hazard]) -> bool:
    """True if the node has neighbours, and all are FP32 nodes or FP32 inputs and outputs."""
    sources, sinks = ([t for t in ts if analysis.is_float(t)] for ts in (node.input, node.output))
    neighbours = [n for n in map(analysis.producer, sources) if n is not None]
    neighbours += [reader for t in sinks for _, reader in analysis.readers(t)]
    inputs = (t for t in sources if analysis.producer(t) is None and not analysis.is_constant(t))
    ends = [analysis.source(t) for t in inputs]
    ends += [name for t in sinks for name in analysis.aliases(t) if analysis.graph.is_output(name)]
    inside = all(id(n) in hazards for n in neighbours) and all(analysis.stays_fp32(t) for t in ends)
    return bool(neighbours) and inside
