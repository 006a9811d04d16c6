"""A model to find a plan for, and the metric of a plan by emulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

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
from rewriter.planning.costs.prices import Prices
from rewriter.planning.planner import LOW_TYPES, surveys
from rewriter.verification.expected import as_declared

Sample = Mapping[str, Array]


@dataclass(frozen=True)
class Problem:
    """A model to find a plan for, and the outputs that plans are compared with.

    Attributes:
        model: The model fitted to the rules' plan. Candidates are ranked and priced on it.
        expected: Outputs of the original in FP32 for each of `samples`.
        accumulation: As for `emulation.emulation`.
        target: The target whose recorded costs are used.
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
        """Recorded costs of the model's nodes, at the shapes of the first sample."""
        return priced(self.model, tensor_facts.at_sizes(self.model, self.samples[0]), self.target)

    def survey(self, plan: Plan) -> Survey:
        """Returns the main graph as the hazard rules see it, without ranges."""
        wanted = PrecisionRequest(LOW_TYPES[plan.precision], plan.io)
        return next(iter(surveys(self.model, self.facts, {}, wanted)))

    def lowered(self, plan: Plan) -> Model:
        """Returns the model with the operators and types of `plan`."""
        model = self.model if self.adapted is None else self.adapted(plan)
        facts = self.facts if model is self.model else tensor_facts.infer(model)
        return retype(model, facts, request(model, plan, ""))

    def errors(self, plan: Plan) -> Divergence:
        """Returns the error that each node of the main graph adds under `plan`: one run over the samples."""
        return diverge(self.model, self.lowered(plan), self.samples, self.accumulation)

    def emulated(self, plan: Plan, metric: Metric) -> float:
        """Returns the metric of `plan`, the worst over samples, with TF32 for FP32 products."""
        return self._run(plan, metric, lambda m, facts: emulation(m, facts, self.accumulation, tf32=True))

    def with_rounded_constants(self, plan: Plan, metric: Metric) -> float:
        """Returns the metric with the rounded weights of `plan` and all arithmetic in FP32."""
        return self._run(plan, metric, reference)

    def _run(self, plan: Plan, metric: Metric, fp32_form: Callable[[Model, Facts], Model]) -> float:
        lowered = self.lowered(plan)
        with Session(fp32_form(lowered, tensor_facts.infer(lowered))) as session:
            values = [
                metric.worst(expected, session.run(as_declared(lowered, sample)))
                for sample, expected in zip(self.samples, self.expected, strict=True)
            ]
        return min(values) if metric.least else max(values)
