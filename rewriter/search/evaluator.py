"""Evaluates plans: the metric and the latency, by emulation and recorded costs, or by another judge."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from rewriter.base import Target
from rewriter.emulation import Accumulation, emulation, reference
from rewriter.emulation.divergence import Divergence, diverge
from rewriter.engines.onnxruntime import Session
from rewriter.figures.metrics import Metric
from rewriter.graph.casts import retype
from rewriter.hazards.survey import PrecisionRequest, Survey
from rewriter.model import Array, Model
from rewriter.model import facts as tensor_facts
from rewriter.model.facts import Facts
from rewriter.passes.mixed_precision import request
from rewriter.plan import Plan
from rewriter.planning.costs.estimate import priced
from rewriter.planning.costs.node_times import ORIGIN
from rewriter.planning.costs.prices import Prices
from rewriter.planning.planner import LOW_TYPES, surveys
from rewriter.verification.expected import as_declared

Sample = Mapping[str, Array]
Standin = Callable[[Model, Facts], Model]


@dataclass(frozen=True)
class Measured:
    """The metric and the latency of a plan.

    Attributes:
        value: The metric, the worst over all outputs and samples; if the plan failed, the worst there is.
        latency_us: Microseconds of one inference; None if the plan failed.
        spread_us: How far two measurements of one plan may be apart; 0 for an estimate.
        problem: Why it failed; "" if it did not.
        untried: True if time ran out before it was tried.
    """

    value: float
    latency_us: float | None
    spread_us: float = 0.0
    problem: str = ""
    untried: bool = False

    @classmethod
    def failed(cls, metric: Metric, problem: str, *, untried: bool = False) -> Measured:
        return cls(-math.inf if metric.least else math.inf, None, 0.0, problem, untried)


Judged = tuple[int, Measured]
"""The index of a plan in the request, and its evaluation."""


class Evaluator(Protocol):
    """Judges whole plans, many at a time."""

    @property
    def origin(self) -> str:
        """Source of the latencies, for the report."""
        ...

    def measured(self, plans: Sequence[Plan]) -> Iterator[Judged]:
        """Yields the evaluation of each plan as it becomes known. A plan that fails raises no error."""
        ...

    def affords(self) -> int:
        """Returns how many more plans there should be time for."""
        ...


@dataclass(frozen=True)
class Problem:
    """A model to find a plan for, and the outputs that plans are compared with.

    Attributes:
        model: Fitted to the rules' plan. Candidates are ranked and priced on it.
        expected: Outputs of the original in FP32 for each of `samples`.
        accumulation: As for `emulation.emulation`.
        target: Its recorded prices are those of the plans.
        adapted: Returns the model before it is lowered to a candidate; None: `model` for all candidates.
    """

    model: Model
    facts: Facts
    samples: Sequence[Sample]
    expected: Sequence[Mapping[str, Array]]
    accumulation: Accumulation = "fp16"
    target: Target = field(default_factory=Target)
    adapted: Callable[[Plan], Model] | None = None

    @cached_property
    def prices(self) -> Prices:
        """Recorded costs of the model's nodes."""
        return priced(self.model, self.facts, self.target)

    def survey(self, plan: Plan) -> Survey:
        """Returns the main graph as the hazard rules see it, without ranges."""
        wanted = PrecisionRequest(LOW_TYPES[plan.precision], plan.io)
        return next(iter(surveys(self.model, self.facts, {}, wanted)))

    def lowered(self, plan: Plan) -> Model:
        """Returns the model with the operators and types of `plan`."""
        model = self.model if self.adapted is None else self.adapted(plan)
        facts = self.facts if model is self.model else tensor_facts.infer(model)
        return retype(model, facts, request(model, plan, ""))

    def errors(self, plan: Plan, until: float = math.inf) -> Divergence:
        """The error that each node of the main graph adds under `plan`: one run over the samples.

        Raises:
            TimeUpError: it had not ended at `until`, by time.monotonic().
        """
        return diverge(self.model, self.lowered(plan), self.samples, self.accumulation, until=until)


@dataclass(frozen=True)
class Emulator:
    """The judge that works without a GPU."""

    problem: Problem
    metric: Metric
    origin: str = ORIGIN

    def value(self, plan: Plan) -> float:
        accumulation = self.problem.accumulation
        return self._run(plan, lambda model, facts: emulation(model, facts, accumulation, tf32=True))

    def weights_alone(self, plan: Plan) -> float:
        """The metric with the rounded weights of `plan`, and all arithmetic in FP32."""
        return self._run(plan, reference)

    def latency_us(self, plan: Plan) -> float:
        return self.problem.prices.total_us(plan)

    def measured(self, plans: Sequence[Plan]) -> Iterator[Judged]:
        for place, plan in enumerate(plans):
            yield place, Measured(self.value(plan), self.latency_us(plan))

    def affords(self) -> int:
        return sys.maxsize

    def _run(self, plan: Plan, stand_in: Standin) -> float:
        lowered, values = self.problem.lowered(plan), []
        with Session(stand_in(lowered, tensor_facts.infer(lowered))) as session:
            for sample, expected in zip(self.problem.samples, self.problem.expected, strict=True):
                values.append(self.metric.worst(expected, session.run(as_declared(lowered, sample))))
        return min(values) if self.metric.least else max(values)
