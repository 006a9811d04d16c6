"""Fits a saved or edited plan to a model: finds every node that it names, or refuses it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from onnx import NodeProto

from rewriter.hazards.planning.planner import has_bf16, surveys
from rewriter.hazards.survey import PrecisionRequest
from rewriter.ir.base import Kept
from rewriter.ir.errors import UsageError
from rewriter.ir.graph import label
from rewriter.ir.model import Model
from rewriter.ir.model.facts import Facts
from rewriter.ir.plan import Decision, Plan, node_key

SAME_MODEL = (
    "a plan fits the model that it was saved for, with the same `passes`, `skip`, `opset` and `target`; "
    "save a new one with `save-plan`"
)
LIKENESS = 0.8
"""Share of a name that must agree (difflib's ratio) for a suggestion."""


def kept_by_user(plan: Plan) -> Kept:
    """The nodes that a plan keeps because the user named them.

    The passes before the plan must leave them unchanged again, or the plan does not fit their result.
    """
    named = (d for d in plan.decisions if d.rule == "user")
    pairs = ((name, d.op) for d in named for name in (d.node, d.key.partition(":")[2]) if name)
    return Kept(planned=frozenset(pairs))


def fit(model: Model, facts: Facts, plan: Plan, where: str = "the plan") -> Plan:
    """`plan` as it applies to `model`: exactly its nodes in FP32 and BF16, in the model's order.

    Args:
        model: The input of the precision pass: the model after the structural passes.
        where: The plan's file, for messages.

    Raises:
        UsageError: a node of the plan is not in the model, has another operator there, shares its name with
            others, or has no BF16; or the plan is for another number of float nodes.
    """
    nodes = _index(model, facts, plan)
    kept: dict[str, Decision] = {}
    for decision in plan.decisions:
        key = nodes.key_of(decision, where)
        node = nodes.by_key[key]
        if decision.repair == "bf16" and not has_bf16(node, model.opsets):
            hint = "put it under fp32, or give a higher `opset`: Conv has BF16 from 22 on"
            raise UsageError(
                f"{label(node)}: {node.op_type} has no BF16 in this opset", where=where, hint=hint
            )
        kept.setdefault(key, replace(decision, node=label(node), op=node.op_type, key=key))
    count = len(nodes.by_key)
    if plan.float_nodes not in (0, count):
        text = f"it is of a model with {plan.float_nodes} float nodes, and this one has {count}"
        raise UsageError(text, where=where, hint=SAME_MODEL)
    ordered = tuple(kept[key] for key in nodes.by_key if key in kept)
    return replace(plan, decisions=ordered, float_nodes=count)


@dataclass
class _Nodes:
    """The nodes that compute in a precision, by key, and the keys by the name that users see."""

    by_key: dict[str, NodeProto] = field(default_factory=dict)
    by_name: dict[str, list[str]] = field(default_factory=dict)

    def key_of(self, decision: Decision, where: str) -> str:
        keys = [decision.key] if decision.key else self.by_name.get(decision.node, [])
        name = decision.node or decision.key
        if len(keys) > 1:
            hint = f'give its "key": {", ".join(keys)}'
            raise UsageError(f"{len(keys)} nodes are called {name}", where=where, hint=hint)
        if not keys or keys[0] not in self.by_key:
            raise self._unknown(decision, where)
        op = self.by_key[keys[0]].op_type
        if decision.op not in ("", op):
            text = f"{name} is {decision.op} in the plan and {op} in the model"
            raise UsageError(text, where=where, hint=SAME_MODEL)
        return keys[0]

    def _unknown(self, decision: Decision, where: str) -> UsageError:
        key = f" (key {decision.key})" if decision.key and decision.node else ""
        near = self._near(decision)
        hint = f"did you mean {near}? Otherwise: {SAME_MODEL}" if near else SAME_MODEL
        what = f"the model has no float node {decision.node or decision.key}{key}"
        return UsageError(what, where=where, hint=hint)

    def _near(self, decision: Decision) -> str:
        known: Iterable[str] = self.by_key if decision.key else self.by_name
        wanted = decision.key or decision.node
        return next(iter(difflib.get_close_matches(wanted, list(known), cutoff=LIKENESS)), "")


def _index(model: Model, facts: Facts, plan: Plan) -> _Nodes:
    nodes = _Nodes()
    for survey in surveys(model, facts, {}, PrecisionRequest(plan.precision, plan.io)):
        for node in survey.nodes:
            key = node_key(survey.scope, node)
            nodes.by_key[key] = node
            nodes.by_name.setdefault(label(node), []).append(key)
    return nodes
