"""The passes of a run, driven with what is known when they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rewriter.base import Calibration, Context, Kept, Pass
from rewriter.data.inputs import Samples
from rewriter.data.ranges import Ranges
from rewriter.jobs.fix.options import Options
from rewriter.jobs.fix.record import Record
from rewriter.model import Model, load
from rewriter.patterns.split_parts import RULE as SPLIT_RULE
from rewriter.pipeline.driver import Driver
from rewriter.plan import Plan
from rewriter.planning.plan_fit import kept_by_user
from rewriter.search.goal import Budget


@dataclass(frozen=True)
class Rewriting:
    """Drives passes over models; what they did goes into `record`."""

    options: Options
    record: Record

    def rewrite(
        self, model: Model, steps: Sequence[Pass], plan: Plan | None = None, ranges: Ranges | None = None
    ) -> Model:
        """The model after passes that need no data."""
        options = self.options
        context = Context(options.opset, options.target, plan, ranges, self._kept(), budget=self._budget())
        return self._driven(model, steps, context)

    def follow(self, model: Model, steps: Sequence[Pass], plan: Plan | None, samples: Samples) -> Model:
        """The model after passes that fit its weights to what a plan leaves in the lower type."""
        options = self.options
        given = Calibration(samples, samples.source.real, options.request.seed)
        context = Context(options.opset, options.target, plan, kept=self._kept(), calibration=given)
        return self._driven(model, steps, context)

    def again(self, steps: Sequence[Pass]) -> Model:
        """The model as some passes left it, made anew: its weights were given back. Nothing is recorded."""
        options = self.options
        context = Context(options.opset, options.target, kept=self._kept(), budget=self._budget())
        return Driver(lambda step: None).run(load(options.source), steps, context)[0]

    def changed(self) -> list[Pass]:
        """The passes before the plan that changed something."""
        phases = self.options.phases
        before = (*phases.structural, *phases.measuring)
        return [step for step, did in zip(before, self.record.passes, strict=False) if did.changes]

    def _driven(self, model: Model, steps: Sequence[Pass], context: Context) -> Model:
        record, total = self.record, len(self.options.steps)
        driver = Driver(lambda step: record.stage.progress(f"pass {step.name}", len(record.passes), total))
        with record.stage("passes"):
            rewritten, results = driver.run(model, steps, context)
        record.passes.extend(results)
        return rewritten

    def _budget(self) -> float | None:
        """Share of latency that may be spent on accuracy: none where an error is the aim; None: not said.

        A plan that is given says what was done: its nodes must be there again.
        """
        goal, plan = self.options.goal, self.options.plan
        if plan is not None:
            return None if any(d.rule == SPLIT_RULE for d in plan.decisions) else 0.0
        return goal.share if isinstance(goal, Budget) else None if goal is None else 0.0

    def _kept(self) -> Kept:
        """What the user keeps in FP32, by the options or in the plan that excludes them."""
        wish, plan = self.options.wish, self.options.plan
        return Kept(wish.keep_nodes, wish.keep_ops) if plan is None else kept_by_user(plan)
