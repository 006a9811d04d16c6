"""What a plan is worth: its metric and its time, by emulation and recorded costs, or by another judge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from rewriter import facts as tensor_facts
from rewriter.checks import as_declared
from rewriter.costs import ORIGIN, Prices
from rewriter.emulation import Accumulation, emulation, reference
from rewriter.emulation.divergence import Divergence, diverge
from rewriter.engines.onnxruntime import Session
from rewriter.facts import Facts
from rewriter.metrics import Metric
from rewriter.model import Array, Model
from rewriter.passes.mixed_precision import request
from rewriter.plan import Plan
from rewriter.retype import retype

Sample = Mapping[str, Array]
Standin = Callable[[Model, Facts], Model]


class Evaluator(Protocol):
    """Judges whole plans; the search asks it about each plan once."""

    @property
    def origin(self) -> str:
        """Where the times come from, for the report."""
        ...

    def value(self, plan: Plan) -> float:
        """The metric of the model under `plan`, the worst over all outputs and samples."""
        ...

    def latency_us(self, plan: Plan) -> float | None:
        """Microseconds of one inference under `plan`; None if there is no way to tell."""
        ...


@dataclass(frozen=True)
class Problem:
    """What is searched for: a model after the structural passes, and what the original gives.

    Attributes:
        expected: Outputs of the original in FP32 for each of `samples`.
        accumulation: As for `emulation.emulation`.
    """

    model: Model
    facts: Facts
    samples: Sequence[Sample]
    expected: Sequence[Mapping[str, Array]]
    accumulation: Accumulation = "fp16"

    @cached_property
    def prices(self) -> Prices:
        """Recorded costs of the model's nodes."""
        return Prices.of(self.model, self.facts)

    def lowered(self, plan: Plan) -> Model:
        """The model with the types of `plan`."""
        return retype(self.model, self.facts, request(self.model, plan, ""))

    def errors(self, plan: Plan) -> Divergence:
        """The error that each node of the main graph adds under `plan`: one run over the samples."""
        return diverge(self.model, self.lowered(plan), self.samples, self.accumulation)


@dataclass(frozen=True)
class Emulator:
    """The judge that works without a GPU."""

    problem: Problem
    metric: Metric
    origin: str = ORIGIN

    def value(self, plan: Plan) -> float:
        accumulation = self.problem.accumulation
        return self._run(plan, lambda model, facts: emulation(model, facts, accumulation))

    def weights_alone(self, plan: Plan) -> float:
        """The metric with the rounded weights of `plan`, and all arithmetic in FP32."""
        return self._run(plan, reference)

    def latency_us(self, plan: Plan) -> float | None:
        return self.problem.prices.total_us(plan)

    def _run(self, plan: Plan, stand_in: Standin) -> float:
        lowered, values = self.problem.lowered(plan), []
        with Session(stand_in(lowered, tensor_facts.infer(lowered))) as session:
            for sample, expected in zip(self.problem.samples, self.problem.expected, strict=True):
                values.append(self.metric.worst(expected, session.run(as_declared(lowered, sample))))
        return min(values) if self.metric.least else max(values)
