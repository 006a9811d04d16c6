"""The plans that a search tries: each is emulated once, and priced by recorded costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from rewriter.hazards.planning.costs import Prices, priced
from rewriter.hazards.planning.planner import extend_plan, in_bf16, surveys
from rewriter.hazards.survey import PrecisionRequest, Survey
from rewriter.ir.base import Target
from rewriter.ir.graph.casts import retype
from rewriter.ir.graph.fusion import conv_depth
from rewriter.ir.graph.ops import COMPUTE_BOUND
from rewriter.ir.model import Array, Model
from rewriter.ir.model import facts as tensor_facts
from rewriter.ir.model.facts import Facts
from rewriter.ir.plan import Plan, node_key
from rewriter.jobs.search.goal import Found, Goal
from rewriter.jobs.search.node_sets import in_attention, residual_streams, taking_sums
from rewriter.judge.expected import as_declared
from rewriter.passes.mixed_precision import request
from rewriter.runtime.emulation import Accumulation, emulation, reference
from rewriter.runtime.emulation.accumulate import sum_error
from rewriter.runtime.emulation.divergence import diverge
from rewriter.runtime.engines.onnxruntime import Session
from rewriter.runtime.figures.metrics import Metric

LEAST_US = 0.01
"""Keeps the ranking finite for nodes without cost: two Casts that are fused."""

Sample = Mapping[str, Array]

Types = tuple[frozenset[str], frozenset[str]]
"""The nodes of a plan in FP32, and those in BF16: plans that agree in them give the same model."""


@dataclass(frozen=True)
class Candidate:
    """Nodes whose type differs from the rules' plan, by their keys; no node is in two of the sets.

    Attributes:
        added: Nodes moved to FP32.
        released: Nodes taken out of FP32.
        bf16: Nodes moved from FP32 to BF16.
    """

    added: frozenset[str] = frozenset()
    released: frozenset[str] = frozenset()
    bf16: frozenset[str] = frozenset()


def added(keys: Iterable[str]) -> Candidate:
    return Candidate(frozenset(keys))


def bisect(high: int, test: Callable[[int], bool]) -> int:
    """Returns the smallest number from 1 to `high` that passes the test, which `high` passes."""
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if test(middle) else (middle, high)
    return high


@dataclass(frozen=True)
class Problem:
    """A model to find a plan for, and the outputs that plans are compared with.

    Attributes:
        model: The model that the rules' plan is for. Candidates are ranked and priced on it.
        expected: Outputs of the original in FP32 for each of `samples`.
        accumulation: Type of the sums of an emulated plan. `ranking_sums`: of those in the ranking.
        target: The target whose recorded costs are used.
    """

    model: Model
    facts: Facts
    samples: Sequence[Sample]
    expected: Sequence[Mapping[str, Array]]
    accumulation: Accumulation = "fp16"
    ranking_sums: Accumulation = "fp16"
    target: Target = field(default_factory=Target)

    @cached_property
    def prices(self) -> Prices:
        """Recorded costs of the model's nodes, at the shapes of the first sample."""
        return priced(self.model, tensor_facts.at_sizes(self.model, self.samples[0]), self.target)

    def survey(self, plan: Plan) -> Survey:
        """Returns the main graph as the hazard rules see it, without ranges."""
        wanted = PrecisionRequest(plan.precision, plan.io)
        return next(iter(surveys(self.model, self.facts, {}, wanted)))

    def lowered(self, plan: Plan) -> Model:
        """Returns the model with the types of `plan`."""
        return retype(self.model, self.facts, request(self.model, plan, ""))

    def value(self, plan: Plan, metric: Metric, *, weights_alone: bool = False) -> float:
        """Returns the metric of `plan`, the worst over samples, with TF32 for FP32 products.

        Args:
            weights_alone: Emulate the rounded weights of `plan`, with all arithmetic in FP32.
        """
        lowered = self.lowered(plan)
        facts = tensor_facts.infer(lowered)
        if weights_alone:
            model = reference(lowered, facts)
        else:
            model = emulation(lowered, facts, self.accumulation, tf32=True)
        with Session(model) as session:
            values = [
                metric.worst(expected, session.run(as_declared(lowered, sample)))
                for sample, expected in zip(self.samples, self.expected, strict=True)
            ]
        return min(values) if metric.least else max(values)

    def added_errors(self, plan: Plan) -> dict[str, float]:
        """Returns the error that each node of the main graph adds under `plan`, by its key: one emulation.

        Nodes without float outputs have the largest error of their inputs.
        """
        tensors: dict[str, float] = {}
        errors: dict[str, float] = {}
        rows = diverge(self.model, self.lowered(plan), self.samples, self.ranking_sums).nodes
        for row in rows:
            if row.added > 0.0:
                tensors[row.tensor] = max(tensors.get(row.tensor, 0.0), row.added)
                errors[row.key] = max(errors.get(row.key, 0.0), row.added)
        measured = {row.key for row in rows}
        for node in self.model.proto.graph.node:
            key, read = node_key(0, node), [tensors[name] for name in node.input if name in tensors]
            if key not in measured and read:
                errors[key] = max(read)
        if self.ranking_sums == "fp32":
            for key, error in self._errors_of_sums():
                errors[key] = math.hypot(errors.get(key, 0.0), error)
        return errors

    def _errors_of_sums(self) -> Iterator[tuple[str, float]]:
        """Yields the error that FP16 sums add to each Conv, for a model too large to rank with them."""
        for node in self.model.proto.graph.node:
            weight = self.facts.main.get(node.input[1]) if node.op_type == "Conv" else None
            if weight is not None and weight.shape is not None:
                sizes = [size if isinstance(size, int) else 1 for size in weight.shape]
                yield node_key(0, node), sum_error(conv_depth(node, sizes))


@dataclass
class Trials:
    """Plans for one problem, with their evaluations.

    Attributes:
        plan: The rules' plan.
        reason: The reason in the plan for a node that the search puts in FP32.
        count: Number of whole models that were evaluated.
    """

    problem: Problem
    plan: Plan
    metric: Metric
    reason: str
    count: int = 0
    _plans: dict[Candidate, Plan] = field(default_factory=dict)
    _values: dict[Types, float] = field(default_factory=dict)

    @property
    def prices(self) -> Prices:
        return self.problem.prices

    def plan_of(self, candidate: Candidate) -> Plan:
        """Returns the rules' plan with the changes of a candidate, islands merged."""
        if candidate not in self._plans:
            extra = dict.fromkeys(sorted(candidate.added), self.reason)
            problem, released = self.problem, candidate.released
            plan = extend_plan(problem.model, problem.facts, self.plan, extra, released)
            self._plans[candidate] = in_bf16(plan, candidate.bf16)
        return self._plans[candidate]

    def types(self, candidate: Candidate) -> Types:
        plan = self.plan_of(candidate)
        return plan.fp32, plan.bf16

    def value(self, candidate: Candidate) -> float:
        """Returns the metric of a candidate's plan."""
        if (types := self.types(candidate)) not in self._values:
            self.count += 1
            self._values[types] = self.problem.value(self.plan_of(candidate), self.metric)
        return self._values[types]

    def latency_us(self, candidate: Candidate) -> float:
        """Returns the estimated time of a candidate's plan."""
        return self.prices.total_us(self.plan_of(candidate))

    def different(self, candidates: Iterable[Candidate], seen: set[Types]) -> Iterator[Candidate]:
        """Yields candidates whose plans differ from each other and from those in `seen`, which grows."""
        for candidate in candidates:
            if (types := self.types(candidate)) not in seen:
                seen.add(types)
                yield candidate

    def found(
        self,
        goal: Goal,
        candidate: Candidate,
        *,
        met: bool = True,
        weights: float | None = None,
        refused: float | None = None,
    ) -> Found:
        """Returns the outcome of a search that ends with a candidate; see `Found`."""
        rules = Candidate()
        value, before, base = self.value(candidate), self.value(rules), self.latency_us(rules)
        cost = self.latency_us(candidate) - base
        plan = self.plan_of(candidate)
        return Found(goal, met, plan, value, before, self.count, cost, base, weights, refused)

    def weights_alone(self) -> float:
        """Returns the metric if only the weights of MatMul, Conv and their like are rounded."""
        self.count += 1
        graph = self.problem.model.proto.graph
        others = (node_key(0, n) for n in graph.node if n.op_type not in COMPUTE_BOUND)
        return self.problem.value(self.plan_of(added(others)), self.metric, weights_alone=True)

    @cached_property
    def ranking(self) -> list[str]:
        """The keys of the nodes that add an error and are not kept yet, best first.

        The order is that of the squared error over the estimated cost of FP32.
        """
        self.count += 1
        errors = self.problem.added_errors(self.plan)
        kept, extra = self.plan.fp32 | self.plan.bf16, self.prices.extra
        open_keys = [key for key in errors if key in extra and key not in kept]
        return sorted(open_keys, key=lambda key: -(errors[key] ** 2) / (extra[key] + LEAST_US))

    def useful_nodes(self, *, norms: bool = False) -> list[str]:
        """Returns the ranking without nodes that make an engine worse; `norms` keeps norms that take sums."""
        barred = self._in_attention if norms else self._worse
        return [key for key in self.ranking if key not in barred]

    def streams(self) -> list[str]:
        """Returns the residual streams, without nodes that make an engine worse in FP32."""
        survey = self.problem.survey(self.plan)
        return [key for key in residual_streams(survey, self.prices, self.plan) if key not in self._worse]

    def all_nodes(self) -> list[str]:
        """Returns the useful nodes, then, as a last resort, the other nodes of the ranking."""
        return list(dict.fromkeys((*self.useful_nodes(), *self.ranking)))

    @cached_property
    def _in_attention(self) -> frozenset[str]:
        return in_attention(self.prices, self.plan)

    @cached_property
    def _worse(self) -> frozenset[str]:
        return self._in_attention | taking_sums(self.problem.survey(self.plan), self.plan)
