"""The cheapest plan that meets a tolerance: more nodes in FP32, by the error that they add for their cost.

What the rules keep stays kept: a hazard may show on data that are not here. The search adds nodes. It ranks
them by the squared error that each adds by itself (`divergence`), over the estimated cost of keeping it;
finds by bisection how many of the best are needed; and then gives back what is not, in halves, dearest
first. That is O(k log n) emulations, and never more than `most_emulations`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rewriter.costs import Prices
from rewriter.emulation.divergence import Divergence
from rewriter.hazards.survey import MATRIX_OPS
from rewriter.plan import Plan
from rewriter.planner import extend_plan, node_key
from rewriter.search.evaluate import Emulator, Evaluator, Problem
from rewriter.search.goal import Found, Goal, most_emulations

__all__ = ["Emulator", "Evaluator", "Found", "Goal", "Problem", "most_emulations", "search"]


def search(problem: Problem, plan: Plan, goal: Goal, evaluator: Evaluator | None = None) -> Found:
    """Search from the rules' plan.

    Args:
        problem: The model after the structural passes, the samples and what the original gives.
        evaluator: Who judges plans; None: emulation and recorded costs. Which nodes are tried first is
            always told by emulation.

    Raises:
        ArithmeticRunError: ONNX Runtime cannot run the model.
    """
    emulator = Emulator(problem, goal.measure)
    trials = _Trials(problem, plan, goal, evaluator or emulator)
    before = trials.value(())
    if goal.meets(before):
        return trials.found((), before, None)
    trials.count += 1
    weights = emulator.weights_alone(trials.weighted())
    if not goal.meets(weights):
        return trials.missed(before, before, weights)
    trials.count += 1
    ranked = trials.ranking(problem.errors(plan))
    needed = _bisect(ranked, trials)
    if needed is None:
        return trials.missed(trials.value(ranked), before, weights)
    kept = _given_back(ranked[:needed], trials)
    return trials.found(kept, before, weights)


def _bisect(ranked: Sequence[str], trials: _Trials) -> int | None:
    """How many of the best nodes are needed; None if all are not enough."""
    if not trials.meets(ranked):
        return None
    low, high = 0, len(ranked)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if trials.meets(ranked[:middle]) else (middle, high)
    return high


def _given_back(chosen: Sequence[str], trials: _Trials) -> tuple[str, ...]:
    """Leave out in halves, quarters, ... of the dearest what is not needed."""
    kept = sorted(chosen, key=lambda key: -trials.prices.extra[key])
    size, budget = len(kept) // 2, 2 * math.ceil(math.log2(len(trials.prices.extra) + 1))
    start = 0
    while size and budget > 0:
        without = [*kept[:start], *kept[start + size :]]
        budget -= 1
        if without != kept and trials.meets(without):
            kept = without
        else:
            start += size
        if start >= len(kept):
            start, size = 0, size // 2
    return tuple(kept)


@dataclass
class _Trials:
    """Plans with more nodes in FP32, and what they were found to give; each is judged once."""

    problem: Problem
    plan: Plan
    goal: Goal
    evaluator: Evaluator
    count: int = 0
    _values: dict[frozenset[str], float] = field(default_factory=dict)

    @property
    def prices(self) -> Prices:
        return self.problem.prices

    def ranking(self, found: Divergence) -> list[str]:
        """Keys of the nodes that add an error and are not kept yet, best first."""
        extra, errors = self.prices.extra, self._errors(found)
        open_keys = [key for key in errors if key in extra and key not in self.plan.fp32]
        return sorted(open_keys, key=lambda key: -(errors[key] ** 2) / (extra[key] + LEAST_US))

    def _errors(self, found: Divergence) -> dict[str, float]:
        """The error that each node adds; one that makes no floats, as Greater, has that of what it reads."""
        tensors: dict[str, float] = {}
        errors: dict[str, float] = {}
        for row in found.nodes:
            if row.added > 0.0:
                tensors[row.tensor] = max(tensors.get(row.tensor, 0.0), row.added)
                errors[row.key] = max(errors.get(row.key, 0.0), row.added)
        measured = {row.key for row in found.nodes}
        for node in self.problem.model.proto.graph.node:
            key, read = node_key(0, node), [tensors[name] for name in node.input if name in tensors]
            if key not in measured and read:
                errors[key] = max(read)
        return errors

    def weighted(self) -> Plan:
        """The rules' plan with every node in FP32 but MatMul, Conv and their like, which hold the weights."""
        graph = self.problem.model.proto.graph
        return self.extended([node_key(0, n) for n in graph.node if n.op_type not in MATRIX_OPS])

    def extended(self, keys: Sequence[str]) -> Plan:
        reason = f"added by the search for {self.goal}"
        return extend_plan(self.problem.model, self.problem.facts, self.plan, dict.fromkeys(keys, reason))

    def meets(self, keys: Sequence[str]) -> bool:
        return self.goal.meets(self.value(keys))

    def value(self, keys: Sequence[str]) -> float:
        """The metric with these nodes in FP32, too."""
        plan = self.extended(keys)
        if plan.fp32 not in self._values:
            self.count += 1
            self._values[plan.fp32] = self.evaluator.value(plan)
        return self._values[plan.fp32]

    def found(self, keys: Sequence[str], before: float, weights: float | None) -> Found:
        value, plan = self.value(keys), self.extended(keys)
        times = [self.evaluator.latency_us(p) or 0.0 for p in (plan, self.plan)]
        cost, origin = times[0] - times[1], self.evaluator.origin
        return Found(plan, True, value, before, weights, self.count, cost, self.goal, origin)

    def missed(self, value: float, before: float, weights: float) -> Found:
        origin = self.evaluator.origin
        return Found(self.plan, False, value, before, weights, self.count, 0.0, self.goal, origin)


LEAST_US = 0.01
"""Keeps the ranking finite for nodes without cost: two Casts that are fused."""
