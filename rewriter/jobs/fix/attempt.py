"""One attempt at a model: passes, plan, and the checks of its arithmetic."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rewriter.base import Pass
from rewriter.data.inputs import Samples
from rewriter.data.ranges import Ranges
from rewriter.data.ranges.depth import TensorAtDepth, along_depth
from rewriter.jobs.fix.causes import Cause, causes, folded_statistics, fused_norms
from rewriter.jobs.fix.job import FixJob
from rewriter.jobs.fix.planning import Planning
from rewriter.jobs.fix.proof import ARITHMETIC, Proof
from rewriter.jobs.fix.record import Record
from rewriter.jobs.fix.rewriting import Rewriting
from rewriter.jobs.fix.yardstick import Yardstick
from rewriter.model import Model
from rewriter.model.stopwatch import Stopwatch
from rewriter.pipeline.driver import PassResult
from rewriter.plan import Plan, Range
from rewriter.planning.rescaled_nodes import hazards_first, unscaled_overflows
from rewriter.verification.verdict import GOALS, Check


@dataclass(frozen=True)
class Given:
    """What all attempts at a model share.

    Attributes:
        fitting: Samples for ranges and searches.
        yardstick: What results are compared with.
        warnings: Sentences about the model and its data.
        measured: By the passes before the plan.
    """

    original: Model
    fitting: Samples
    yardstick: Yardstick
    stage: Stopwatch
    warnings: tuple[str, ...]
    measured: dict[tuple[Pass, ...], Measured] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """A model that a plan is made for: a remedy that keeps the passes before the plan starts from it.

    Attributes:
        passes: What the passes did.
        checks: The check of its structure.
        warnings: What was said of it.
        depth: Its ranges, for reports.
    """

    model: Model
    ranges: Ranges
    passes: tuple[PassResult, ...]
    checks: tuple[Check, ...]
    warnings: tuple[str, ...]
    depth: tuple[TensorAtDepth, ...]


@dataclass(frozen=True)
class Attempt:
    """A rewritten model with its plan and the checks of its arithmetic.

    Attributes:
        structured: The model in FP32, before its types changed.
        fixed: The result.
        causes: What was wrong, and what was done about it.
        depth: Ranges of the model that the plan was made for; empty if the plan was given.
        measured_s: Seconds until its ranges were known; a job of the same `measured_steps` spends none.
        planned_s: Seconds of the rest, without what the yardstick measured for it and keeps.
    """

    job: FixJob
    record: Record
    proof: Proof
    structured: Model
    fixed: Model
    plan: Plan | None
    causes: tuple[Cause, ...] = ()
    depth: tuple[TensorAtDepth, ...] = ()
    measured_s: float = 0.0
    planned_s: float = 0.0

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.proof.done if check.passed is False)

    @property
    def is_wrong(self) -> bool:
        """True if the arithmetic failed; a search that misses its goal is no reason to repair."""
        return any(check.name not in GOALS for check in self.failed)

    @property
    def error(self) -> float:
        """Largest error of the deciding check in units of its tolerance; infinite if another check failed."""
        deciding = self.proof.arithmetic
        others = [c for c in self.failed if c.name not in ARITHMETIC and c.name not in GOALS]
        if others or deciding is None:
            return max((check.error for check in others), default=math.inf if self.failed else 0.0)
        return deciding.error

    @property
    def all_fp32(self) -> bool:
        """True if nothing of it is in reduced precision by our plan."""
        return self.job.wish.precision == "fp32" or (
            self.plan is not None and len(self.plan.fp32) == self.plan.float_nodes > 0
        )

    @property
    def relative_l2(self) -> float | None:
        """Largest relative L2 error of an output, from the deciding check; None if nothing was compared."""
        deciding = self.proof.arithmetic
        return None if deciding is None else max(o.relative_l2 for o in deciding.outputs)

    @property
    def latency_us(self) -> float | None:
        """Median latency of its engine; None if none ran."""
        timed = (check.latency for check in self.proof.done if check.latency is not None)
        return next((latency.median_us for latency in timed), None)


def attempt(job: FixJob, given: Given) -> Attempt:
    """Runs the passes of a job and checks the arithmetic of their result."""
    start, phases, record = time.monotonic(), job.phases, Record(given.stage, warnings=list(given.warnings))
    rewriting = Rewriting(job, record)
    planning = Planning(job, record, rewriting, given.fitting)
    proof = Proof(job, record, rewriting, given.fitting.source, given.yardstick)
    key = measured_steps(job)
    if key not in given.measured:
        model, ranges = _measured(rewriting.rewrite(given.original, phases.structural), planning)
        proof.check_structure(model)
        given.measured[key] = Measured(
            model,
            ranges,
            tuple(record.passes),
            tuple(proof.done),
            tuple(record.warnings),
            along_depth(model, ranges),
        )
    known = given.measured[key]
    record.passes[:], proof.done[:], record.warnings[:] = known.passes, known.checks, known.warnings
    structured, measured_at, once = known.model, time.monotonic(), given.yardstick.seconds
    plan = planning.plan(structured, known.ranges) if phases.lowering else None
    plan, structured = planning.adapted(given.original, structured, plan)
    unscaled: Mapping[tuple[int, str], Range] = {}
    if plan is not None and job.plan is None:
        plan = replace(plan, exponents=record.exponents())
        unscaled = unscaled_overflows(plan, known.ranges)
        plan = hazards_first(plan, unscaled)
    fixed = rewriting.rewrite(structured, phases.lowering, plan)
    if record.search is not None and record.search.check is not None and not job.repairing:
        proof.done.append(record.search.check)
    proof.check_types(fixed, plan)
    proof.check_engine(fixed, plan)
    folded = folded_statistics(given.original, known.model)
    found = causes(plan, record.passes, fused_norms(known.model, known.ranges), unscaled, folded)
    measured_s, once_s = measured_at - start, given.yardstick.seconds - once
    planned_s = time.monotonic() - measured_at - once_s
    return Attempt(job, record, proof, structured, fixed, plan, found, known.depth, measured_s, planned_s)


def measured_steps(job: FixJob) -> tuple[Pass, ...]:
    """The steps before the plan: jobs that have the same ones share a measured model."""
    return (*job.phases.structural, *job.phases.measuring)


def _measured(model: Model, planning: Planning) -> tuple[Model, Ranges]:
    """Returns the model that a plan is made for, and its ranges unless the plan is given."""
    phases, plan = planning.job.phases, planning.job.plan
    if plan is not None:  # it holds the results of the measuring passes
        found = planning.rewriting.rewrite(model, phases.measuring, plan) if phases.measuring else model
        return found, Ranges()
    ranges = planning.ranges(model) if phases.measuring or phases.lowering else Ranges()
    if not phases.measuring:
        return model, ranges
    return planning.rewritten_by_ranges(model, phases.measuring, ranges)
