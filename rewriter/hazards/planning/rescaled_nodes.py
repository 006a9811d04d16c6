"""Names the hazard of FP32 nodes that are free, but would overflow in FP16 without `rescale`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rewriter.hazards.planning.free_fp32 import FREE
from rewriter.hazards.planning.planner import LOW_TYPES
from rewriter.hazards.survey import PrecisionRequest
from rewriter.ir.english import figure
from rewriter.ir.plan import Decision, Plan, Range


def unscaled_overflows(plan: Plan, ranges: Mapping[tuple[int, str], Range]) -> dict[tuple[int, str], Range]:
    """The ranges, before `rescale` scaled them, of the tensors that were out of range: by scope and tensor.

    Args:
        plan: Its exponents are those that `rescale` used.
        ranges: By scope and tensor, measured after scaling.
    """
    if plan.precision == "fp32":
        return {}
    before = {
        (scope, tensor): measured.scaled(-k)
        for scope, tensor, k in plan.exponents
        if (measured := ranges.get((scope, tensor))) is not None
    }
    limit = _limit(plan)
    return {place: found for place, found in before.items() if found.absmax > limit}


def hazards_first(plan: Plan, unscaled: Mapping[tuple[int, str], Range]) -> Plan:
    """Returns the plan with the overflow as the reason of each such node, with the range before scaling."""
    if not unscaled:
        return plan
    limit = _limit(plan)
    return replace(plan, decisions=tuple(_renamed(d, unscaled, limit) for d in plan.decisions))


def _limit(plan: Plan) -> float:
    return PrecisionRequest(LOW_TYPES[plan.precision]).limit


def _renamed(decision: Decision, overflowing: Mapping[tuple[int, str], Range], limit: float) -> Decision:
    if decision.rule not in FREE:
        return decision
    scope, _, output = decision.key.partition(":")
    for tensor in (output, decision.tensor or ""):
        found = overflowing.get((int(scope), tensor))
        if found is not None:
            reason = f"{tensor} exceeded {figure(limit)} before rescale scaled it, and FP32 is free here"
            return replace(decision, rule="overflow", reason=reason, tensor=tensor, range=found)
    return decision
