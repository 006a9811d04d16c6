"""The cheapest plan that meets a tolerance: more nodes in FP32, by the error that they add for their cost.

What the rules keep stays kept: a hazard may show on data that are not here. The search adds nodes. It ranks
them by the squared error that each adds by itself (`divergence`), over the estimated cost of keeping it;
finds by bisection how many of the best are needed; and then gives back what is not, in halves, dearest
first. That is O(k log n) emulations, and never more than `most_emulations`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rewriter import facts as tensor_facts
from rewriter.checks import as_declared
from rewriter.costs import extra_us
from rewriter.emulation import Accumulation, emulation, reference
from rewriter.emulation.divergence import Divergence, diverge
from rewriter.engines.onnxruntime import Session
from rewriter.facts import Facts
from rewriter.metrics import METRICS
from rewriter.model import Array, Model
from rewriter.passes.mixed_precision import request
from rewriter.plan import Plan
from rewriter.planner import extend_plan, node_key
from rewriter.retype import retype

Sample = Mapping[str, Array]


@dataclass(frozen=True)
class Goal:
    """What the plan shall reach: a value of a metric of `METRICS`, for every output and sample."""

    tolerance: float
    metric: str = "relative-l2"

    def meets(self, value: float) -> bool:
        return METRICS[self.metric].meets(value, self.tolerance)

    def __str__(self) -> str:
        return f"{self.metric} {'at least' if METRICS[self.metric].least else 'at most'} {self.tolerance:.3g}"


@dataclass(frozen=True)
class Found:
    """The outcome of a search.

    Attributes:
        plan: The cheapest that meets the goal; the rules' plan if none does.
        value: The metric of `plan`, emulated.
        before: That of the rules' plan.
        weights: That of FP32 arithmetic with the rules' plan's rounded weights; None if not measured.
        emulations: How many whole emulations were run, the one for the errors of the nodes included.
        cost_us: Estimated extra time of the nodes that the search put into FP32; see `costs`.
    """

    plan: Plan
    met: bool
    value: float
    before: float
    weights: float | None
    emulations: int
    cost_us: float
    goal: Goal

    @property
    def summary(self) -> str:
        """One sentence for the user."""
        if self.weights is not None and not self.goal.meets(self.weights):
            return (
                f"{self.goal} cannot be met: rounding the weights alone gives {self.weights:.3g}, with all "
                "arithmetic in FP32"
            )
        if not self.met:
            return f"{self.goal} cannot be met: with every node in FP32 it is {self.value:.3g}"
        told = f"{self.goal} is met: {self.value:.3g}, {self.before:.3g} before; {self.emulations} emulations"
        return f"{told}; estimated cost {self.cost_us:.3g} us (recorded on an H200, not measured here)"


def most_emulations(nodes: int) -> int:
    """Upper bound of `Found.emulations`: 3 to begin with, bisection, and two passes of giving back."""
    return 4 + 3 * max(1, math.ceil(math.log2(nodes + 1)))


def search(
    model: Model,
    facts: Facts,
    plan: Plan,
    samples: Sequence[Sample],
    expected: Sequence[Mapping[str, Array]],
    goal: Goal,
    accumulation: Accumulation = "fp16",
) -> Found:
    """Search from the rules' plan.

    Args:
        model: After the structural passes, with its `facts`.
        expected: Outputs of the original in FP32 for each sample.

    Raises:
        ArithmeticRunError: ONNX Runtime cannot run the model.
    """
    trials = _Trials(model, facts, plan, samples, expected, goal, accumulation)
    before = trials.value(())
    if goal.meets(before):
        return trials.found((), before, None)
    weights = trials.run(reference)
    if not goal.meets(weights):
        return replace(trials.found((), before, weights), met=False, value=before)
    trials.count += 1
    ranked = trials.ranking(diverge(model, trials.lowered(plan), samples, accumulation))
    needed = _bisect(ranked, trials)
    if needed is None:
        value = trials.value(tuple(ranked))
        return replace(trials.found((), before, weights), met=False, value=value)
    kept = _given_back(ranked[:needed], trials)
    return trials.found(kept, before, weights)


def _bisect(ranked: Sequence[str], trials: _Trials) -> int | None:
    """How many of the best nodes are needed; None if all are not enough."""
    if not trials.meets(tuple(ranked)):
        return None
    low, high = 0, len(ranked)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if trials.meets(tuple(ranked[:middle])) else (middle, high)
    return high


def _given_back(chosen: Sequence[str], trials: _Trials) -> tuple[str, ...]:
    """Leave out in halves, quarters, ... of the dearest what is not needed."""
    kept = sorted(chosen, key=lambda key: -trials.costs[key])
    size, budget = len(kept) // 2, 2 * math.ceil(math.log2(len(trials.costs) + 1))
    start = 0
    while size and budget > 0:
        without = [*kept[:start], *kept[start + size :]]
        budget -= 1
        if without != kept and trials.meets(tuple(without)):
            kept = without
        else:
            start += size
        if start >= len(kept):
            start, size = 0, size // 2
    return tuple(kept)


@dataclass
class _Trials:
    """Plans with more nodes in FP32, and what they were measured to give; each is emulated once."""

    model: Model
    facts: Facts
    plan: Plan
    samples: Sequence[Sample]
    expected: Sequence[Mapping[str, Array]]
    goal: Goal
    accumulation: Accumulation
    count: int = 0
    costs: dict[str, float] = field(default_factory=dict)
    _values: dict[frozenset[str], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shapes = {name: found.shape for name, found in self.facts.main.items()}
        graph = self.model.proto.graph
        constants = {t.name for t in graph.initializer}
        constants |= {n.output[0] for n in graph.node if n.op_type == "Constant"}
        for node in graph.node:
            if node.op_type != "Constant" and any(node.output):
                self.costs[node_key(0, node)] = extra_us(node, shapes, constants)

    def ranking(self, found: Divergence) -> list[str]:
        """Keys of the nodes that add an error and are not kept yet, best first."""
        errors: dict[str, float] = {}
        for node in found.nodes:
            if node.key in self.costs and node.key not in self.plan.fp32 and node.added > 0.0:
                errors[node.key] = max(errors.get(node.key, 0.0), node.added)
        return sorted(errors, key=lambda key: -(errors[key] ** 2) / (self.costs[key] + LEAST_US))

    def extended(self, keys: Sequence[str]) -> Plan:
        reason = f"added by the search for {self.goal}"
        return extend_plan(self.model, self.facts, self.plan, dict.fromkeys(keys, reason))

    def lowered(self, plan: Plan) -> Model:
        return retype(self.model, self.facts, request(self.model, plan, ""))

    def meets(self, keys: Sequence[str]) -> bool:
        return self.goal.meets(self.value(keys))

    def value(self, keys: Sequence[str]) -> float:
        """The metric with these nodes in FP32, too."""
        plan = self.extended(keys)
        if plan.fp32 not in self._values:
            self._values[plan.fp32] = self.run(self._emulated, plan)
        return self._values[plan.fp32]

    def _emulated(self, model: Model, facts: Facts) -> Model:
        return emulation(model, facts, self.accumulation)

    def run(self, stand_in: Standin, plan: Plan | None = None) -> float:
        """The metric of one run of the lowered model's stand-in in FP32."""
        self.count += 1
        lowered = self.lowered(plan or self.plan)
        metric = METRICS[self.goal.metric]
        values = []
        with Session(stand_in(lowered, tensor_facts.infer(lowered))) as session:
            for sample, expected in zip(self.samples, self.expected, strict=True):
                values.append(metric.worst(expected, session.run(as_declared(lowered, sample))))
        return min(values) if metric.least else max(values)

    def found(self, keys: Sequence[str], before: float, weights: float | None) -> Found:
        plan = self.extended(keys)
        cost = sum(self.costs.get(key, 0.0) for key in plan.fp32 - self.plan.fp32)
        value = self.value(keys)
        return Found(plan, self.goal.meets(value), value, before, weights, self.count, cost, self.goal)


LEAST_US = 0.01
"""Keeps the ranking finite for nodes without cost: two Casts that are fused."""

Standin = Callable[[Model, Facts], Model]
