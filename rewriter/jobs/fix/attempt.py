"""One attempt at a model: passes, plan, and the checks of the result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import fsum

from rewriter.hazards.planning.costs import priced
from rewriter.hazards.planning.rescaled_nodes import hazards_first, unscaled_overflows
from rewriter.ir.base import Pass, Stage
from rewriter.ir.model import Model
from rewriter.ir.model import facts as tensor_facts
from rewriter.ir.model.stopwatch import Stopwatch
from rewriter.ir.plan import Plan, Range
from rewriter.jobs.fix.causes import Cause, causes, folded_statistics, fused_norms
from rewriter.jobs.fix.job import FixJob
from rewriter.jobs.fix.judge import ARITHMETIC, Engine, Judge, engine_first
from rewriter.jobs.fix.planning import Planning
from rewriter.jobs.fix.rewriting import Record, Rewriting
from rewriter.jobs.search.run import SearchOutcome
from rewriter.judge.verdict import GOALS, Check
from rewriter.pipeline.driver import PassResult
from rewriter.runtime.figures.outputs import OutputComparison
from rewriter.runtime.inputs import Samples
from rewriter.runtime.ranges import Ranges
from rewriter.runtime.ranges.depth import TensorAtDepth, along_depth


@dataclass(frozen=True)
class Given:
    """What all attempts at a model share.

    Attributes:
        samples: All samples, for ranges. `fitting`: those that searches may fit a plan to.
        warnings: Sentences about the model and its data.
        before: Outputs in plain FP16 or BF16; () if not verified.
        measured: By the passes before the plan.
    """

    original: Model
    samples: Samples
    fitting: Samples
    judge: Judge
    stage: Stopwatch
    warnings: tuple[str, ...]
    before: tuple[OutputComparison, ...] = ()
    measured: dict[tuple[Pass, ...], Measured] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """A model that a plan is made for: attempts that keep the passes before the plan start from it.

    Attributes:
        passes: What the passes did.
        checks: The check of its structure.
        warnings: Sentences about it.
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
    """A rewritten model with its plan and the checks of the result.

    Attributes:
        structured: The model in FP32, before its types changed.
        fixed: The result.
        passes: What the passes did.
        engine: Its engine, if one was built.
        search: The outcome of the search for its plan; None if there was none.
        warnings: Sentences that the user should read.
        causes: What was wrong, and what was done about it.
        depth: Ranges of the model that the plan was made for; empty if the plan was given.
    """

    job: FixJob
    structured: Model
    fixed: Model
    plan: Plan | None
    passes: tuple[PassResult, ...]
    checks: tuple[Check, ...]
    engine: Engine | None = None
    search: SearchOutcome | None = None
    warnings: tuple[str, ...] = ()
    causes: tuple[Cause, ...] = ()
    depth: tuple[TensorAtDepth, ...] = ()

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.passed is False)

    @property
    def sound(self) -> bool:
        """True if every check passed; a search that misses its goal is no defect of the result."""
        return all(check.name in GOALS for check in self.failed)

    @property
    def arithmetic(self) -> Check | None:
        """The check that decides on the arithmetic; None if nothing was compared."""
        compared = {check.name: check for check in self.checks if check.outputs}
        return next((compared[name] for name in ARITHMETIC if name in compared), None)

    @property
    def error(self) -> float:
        """Largest error of the deciding check in units of its tolerance; infinite if another check failed."""
        deciding = self.arithmetic
        others = [c for c in self.failed if c is not deciding and c.name not in GOALS]
        if others or deciding is None:
            return max((check.error for check in others), default=math.inf if self.failed else 0.0)
        return deciding.error

    @property
    def relative_l2(self) -> float | None:
        """Largest relative L2 error of an output, from the deciding check; None if nothing was compared."""
        deciding = self.arithmetic
        return None if deciding is None else max(o.relative_l2 for o in deciding.outputs)

    @property
    def latency_us(self) -> float | None:
        """Median latency of its engine; None if none ran."""
        timed = (check.latency for check in self.checks if check.latency is not None)
        return next((latency.median_us for latency in timed), None)

    @property
    def all_fp32(self) -> bool:
        """True if nothing of it is in reduced precision by our plan."""
        return self.job.wish.precision == "fp32" or (
            self.plan is not None and len(self.plan.fp32) == self.plan.float_nodes > 0
        )

    def changed(self, step: Pass) -> bool:
        """True if a pass changed something."""
        return any(result.name == step.name and result.changes for result in self.passes)


def attempt(job: FixJob, given: Given) -> Attempt:
    """Runs the passes of a job and checks their result."""
    measured = _measured(job, given)
    record = Record(given.stage, list(measured.passes), list(measured.warnings))
    rewriting = Rewriting(job, record)
    planning = Planning(job, record, rewriting, given.samples, given.fitting)
    structured = measured.model
    plan = planning.plan(structured, measured.ranges) if job.phases.lowering else None
    if plan is not None and job.goal is not None:
        plan = planning.searched(given.original, structured, plan, job.goal)
    unscaled: Mapping[tuple[int, str], Range] = {}
    if plan is not None and job.plan is None:
        plan = replace(plan, exponents=record.exponents())
        unscaled = unscaled_overflows(plan, measured.ranges)
        plan = hazards_first(plan, unscaled)
    fixed = rewriting.rewrite(structured, job.phases.lowering, plan)
    checks, engine = _checked(job, given.judge, measured.checks, fixed, plan)
    search = record.search
    if search is not None and search.check is not None and not job.repairing:
        checks = (*checks, search.check)
    folded = folded_statistics(given.original, measured.model)
    fused = fused_norms(measured.model, measured.ranges)
    return Attempt(
        job,
        structured,
        fixed,
        plan,
        tuple(record.passes),
        checks,
        engine,
        search,
        tuple(record.warnings),
        causes(plan, record.passes, fused, unscaled, folded),
        measured.depth,
    )


def explained(made: Attempt, given: Given) -> Attempt:
    """The attempt, with the nodes that add most of the error if its emulation failed."""
    checks = tuple(
        _explained(check, made, given)
        if check.name in ("emulation", "tf32") and check.passed is False
        else check
        for check in made.checks
    )
    return replace(made, checks=checks)


def estimated_us(made: Attempt, given: Given) -> tuple[float, float, float]:
    """The recorded costs of an attempt, of FP32, and of its lower type altogether.

    In us, at the shapes of the first sample.
    """
    if not given.judge.samples:
        return math.inf, math.inf, math.inf
    facts = tensor_facts.at_sizes(made.structured, given.judge.samples[0])
    prices = priced(made.structured, facts, made.job.target)
    broken = fsum(attention.us for attention in prices.attentions)
    fp32 = fsum(prices.base.values()) + fsum(prices.own.values()) + broken
    if made.plan is None:
        return fp32, fp32, math.inf
    return prices.total_us(made.plan), fp32, prices.total_us(replace(made.plan, decisions=()))


def _measured(job: FixJob, given: Given) -> Measured:
    """The model that a plan is made for; jobs with the same steps before the plan share it."""
    phases = job.phases
    key = (*phases.structural, *phases.measuring)
    if key in given.measured:
        return given.measured[key]
    record = Record(given.stage, warnings=list(given.warnings))
    rewriting = Rewriting(job, record)
    planning = Planning(job, record, rewriting, given.samples, given.fitting)
    model, ranges = rewriting.rewrite(given.original, phases.structural), Ranges()
    if job.plan is not None:  # it holds the results of the measuring passes
        model = rewriting.rewrite(model, phases.measuring, job.plan) if phases.measuring else model
    elif phases.measuring or phases.lowering:
        ranges = planning.ranges(model)
        if phases.measuring:
            model, ranges = planning.rewritten_by_ranges(model, phases.measuring, ranges)
    checks = tuple(given.judge.structure(model, rewriting.changed()))
    passes, warnings = tuple(record.passes), tuple(record.warnings)
    found = Measured(model, ranges, passes, checks, warnings, along_depth(model, ranges))
    given.measured[key] = found
    return found


def _checked(
    job: FixJob, judge: Judge, structure: tuple[Check, ...], fixed: Model, plan: Plan | None
) -> tuple[tuple[Check, ...], Engine | None]:
    """All checks of a result: a model that is wrong already is not built, since a repair follows."""
    checks, engine = list(structure), None
    if job.emulated and (plan is not None or job.wish.precision == "fp32"):
        checks += judge.emulated(fixed, plan, job.accumulation)
    wrong = {check.name for check in checks if check.passed is False}
    if "structure" in wrong or (wrong and judge.engine is None) or job.weak_typing:
        return tuple(checks), None
    built, engine = judge.built(fixed, plan)
    return engine_first((*checks, *built)), engine


def _explained(check: Check, made: Attempt, given: Given) -> Check:
    before = made.fixed if check.name == "tf32" else _before_types(made, given)
    return check if before is None else given.judge.explain(check, before, made.fixed, made.job.accumulation)


def _before_types(made: Attempt, given: Given) -> Model | None:
    """The model before its types changed; None if ranges changed it, which takes these ranges again."""
    phases = made.job.phases
    steps = (*phases.structural, *phases.measuring)
    if any(step.stage is Stage.RANGES and made.changed(step) for step in steps):
        return None
    measuring = (step for step in phases.measuring if step.stage is not Stage.RANGES)
    return Rewriting(made.job, Record(given.stage)).again((*phases.structural, *measuring))
