"""Fits a saved or edited plan to a model: finds every node that it names, or refuses it."""

from __future__ import annotations

from dataclasses import replace

from rewriter.base.errors import UsageError, did_you_mean
from rewriter.hazards.analysis import LOW_TYPES, PrecisionRequest
from rewriter.hazards.planning.planner import analyses
from rewriter.ir.graph import display_name
from rewriter.ir.model import Model
from rewriter.ir.model.schemas import type_rules
from rewriter.ir.plan import Decision, Plan, node_key
from rewriter.ir.plan.node_patterns import NodePatterns

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
