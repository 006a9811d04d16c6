"""Runs the passes of `fix` with the data that is known when they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from rewriter.hazards.planning.plan_fit import kept_by_user
from rewriter.ir.base import Context, Kept, Pass, Rescaled
from rewriter.ir.model import Model, load
from rewriter.ir.model.stopwatch import Stopwatch
from rewriter.ir.plan import Plan
from rewriter.jobs.fix.job import FixJob
from rewriter.jobs.search.run import SearchOutcome
from rewriter.pipeline.driver import Driver, PassResult
from rewriter.runtime.ranges import Ranges


@dataclass
class Record:
    """Collects what the stages of one attempt contribute to its result.

    Attributes:
        stage: Counts what is done inside as that stage's.
        passes: In the order in which they ran.
        warnings: Sentences that the user should read.
        search: What the search found; None if there was none.
    """

    stage: Stopwatch
    passes: list[PassResult] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    search: SearchOutcome | None = None

    def exponents(self) -> tuple[tuple[int, str, int], ...]:
        """Returns the tensors multiplied by a power of two so far, in the order of the changes."""
        changes = (change for result in self.passes for change in result.changes)
        return tuple(e for change in changes if isinstance(change, Rescaled) for e in change.exponents)


@dataclass(frozen=True)
class Rewriting:
    """Runs passes over models and adds what they did to `record`."""

    job: FixJob
    record: Record

    def rewrite(
        self, model: Model, steps: Sequence[Pass], plan: Plan | None = None, ranges: Ranges | None = None
    ) -> Model:
        """Returns the model after passes that need no samples."""
        record, total = self.record, len(self.job.steps)
        places = count(len(record.passes))
        driver = Driver(lambda step: record.stage.progress(f"pass {step.name}", next(places), total))
        with record.stage("passes"):
            rewritten, results = driver.run(model, steps, self._context(plan, ranges))
        record.passes.extend(results)
        return rewritten

    def again(self, steps: Sequence[Pass]) -> Model:
        """Returns the model after some passes, loaded again to save memory; nothing is recorded."""
        return Driver().run(load(self.job.source), steps, self._context())[0]

    def changed(self) -> list[Pass]:
        """Returns the passes before the plan that changed something."""
        phases = self.job.phases
        before = (*phases.structural, *phases.measuring)
        return [step for step, did in zip(before, self.record.passes, strict=False) if did.changes]

    def _context(self, plan: Plan | None = None, ranges: Ranges | None = None) -> Context:
        job = self.job
        return Context(job.opset, job.target, plan, ranges, self._kept())

    def _kept(self) -> Kept:
        """Returns what the user keeps in FP32, by the job or in the plan that excludes them."""
        wish, plan = self.job.wish, self.job.plan
        return Kept(wish.keep_nodes, wish.keep_ops) if plan is None else kept_by_user(plan)
