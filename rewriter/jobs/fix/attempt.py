"""One attempt at a model: passes, plan, and the checks of the result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import fsum
from pathlib import Path

from rewriter.hazards.planning.planner import unscaled_overflows
from rewriter.ir.graph.ops import TENSOR_CORE
from rewriter.ir.model import Model
from rewriter.ir.plan import Plan, Range
from rewriter.jobs.fix.causes import Cause, causes, folded_statistics, fused_norms, repaired_defects
from rewriter.jobs.fix.job import FixJob
from rewriter.jobs.fix.making import AttemptBuilder, CalibratedModel, Workload
from rewriter.jobs.search.goal import Found
from rewriter.passes.base import Pass, Rescaled
from rewriter.pipeline.driver import PassResult
from rewriter.target.costs import priced
from rewriter.verification.verdict import GOALS, Check, deciding
from rewriter.verification.verifier import Verifier, engine_first


@dataclass(frozen=True, eq=False)
class Attempt:
    """A rewritten model with its plan and the checks of the result.

    `measured` has the model in FP32, before its types changed. `search` is the outcome of the search
    for its plan, if there was one.
    """

    job: FixJob
    measured: CalibratedModel
    fixed: Model
    plan: Plan | None
    passes: tuple[PassResult, ...]
    checks: tuple[Check, ...]
    engine: Path | None
    search: Found | None
    warnings: tuple[str, ...]
    causes: tuple[Cause, ...]

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.passed is False)

    @property
    def arithmetic(self) -> Check | None:
        """The check that decides on the arithmetic; None if nothing was compared."""
        return deciding(check for check in self.checks if check.outputs)

    @property
    def error(self) -> float:
        """Largest error of the deciding check in units of its tolerance; infinite if another check failed."""
        check = self.arithmetic
        others = [one for one in self.failed if one is not check and one.name not in GOALS]
        if others or check is None:
            return max((one.error for one in others), default=math.inf if self.failed else 0.0)
        return check.error

    @property
    def relative_l2(self) -> float:
        """Largest relative L2 error of an output, from the deciding check; 0.0 if nothing was compared."""
        check = self.arithmetic
        return 0.0 if check is None else max(output.relative_l2 for output in check.outputs if output.counts)

    @property
    def latency_us(self) -> float | None:
        """Median latency of its engine; None if none ran."""
        timed = (check.latency for check in self.checks if check.latency is not None)
        return next((latency.median_us for latency in timed), None)

    @property
    def all_fp32(self) -> bool:
        """True if nothing of it is in reduced precision by our plan."""
        return self.job.precision.precision == "fp32" or (
            self.plan is not None and len(self.plan.fp32) == self.plan.float_nodes > 0
        )

    def changed(self, step: Pass) -> bool:
        return any(result.name == step.name and result.changes for result in self.passes)


@dataclass(frozen=True)
class LatencyShare:
    """The latency of a result in units of another's: `FP32` or `plain FP16`.

    `measured` is True if both ran on this GPU; False if recorded costs were added up.
    """

    of: str
    share: float
    measured: bool


@dataclass(frozen=True)
class Result:
    """The attempt to hand out, and how it was found.

    Attributes:
        lines: What failed at first, and what was tried: one sentence each.
        remark: Why it is not the first attempt that passed; "" if it is.
        stopped: Why not every candidate was tried; "" if all were.
        in_fp32: Error of all of it in FP32, in units of the tolerance, if that failed.
        with_ports: What failed with inputs and outputs as the user wants them; "" if they are.
    """

    made: Attempt
    lines: tuple[str, ...] = ()
    remark: str = ""
    stopped: str = ""
    in_fp32: float | None = None
    with_ports: str = ""
    shares: tuple[LatencyShare, ...] = ()


def attempt(job: FixJob, workload: Workload) -> Attempt:
    """Runs the passes of a job and checks their result."""
    measured = CalibratedModel.by(job, workload)
    making = AttemptBuilder(job, workload, list(measured.passes), list(measured.warnings))
    plan = making.plan(measured.model, measured.ranges) if job.phases.lowering else None
    if plan is not None and job.goal is not None:
        plan = making.searched(measured, plan, job.goal)
    unscaled: Mapping[tuple[int, str], Range] = {}
    if plan is not None and job.plan is None:
        scaled = (c for one in making.passes for c in one.changes if isinstance(c, Rescaled))
        plan = replace(plan, exponents=tuple(e for change in scaled for e in change.exponents))
        unscaled = unscaled_overflows(plan, measured.ranges)
    fixed = making.rewrite(measured.model, job.phases.lowering, plan, measured.ranges)
    checks, engine = _checked(job, workload.judge, measured.checks, fixed, plan)
    if making.search is not None and not job.repairing:
        checks = (*checks, making.search.check)
    folded = folded_statistics(workload.original, measured.model)
    fused = fused_norms(measured.model, measured.ranges)
    defects = repaired_defects(
        workload.original, job.precision.target, job.precision.precision, making.passes
    )
    return Attempt(
        job,
        measured,
        fixed,
        plan,
        tuple(making.passes),
        checks,
        engine,
        making.search,
        tuple(making.warnings),
        (*causes(plan, making.passes, fused, unscaled, folded), *defects),
    )


def estimated_us(attempt: Attempt, workload: Workload) -> tuple[float, float, float]:
    """The recorded costs of an attempt, of FP32, and of its lower type altogether.

    In us, at the shapes of the first sample.
    """
    if not workload.judge.samples:
        return math.inf, math.inf, math.inf
    prices = priced(attempt.measured.model.at_sizes(workload.judge.samples[0]), attempt.job.precision.target)
    broken = fsum(attention.us for attention in prices.attentions)
    fp32 = fsum(prices.base.values()) + fsum(prices.own.values()) + broken
    if attempt.plan is None:
        return fp32, fp32, math.inf
    return prices.total_us(attempt.plan), fp32, prices.total_us(replace(attempt.plan, decisions=()))


def _checked(
    job: FixJob, judge: Verifier, structure: tuple[Check, ...], fixed: Model, plan: Plan | None
) -> tuple[tuple[Check, ...], Path | None]:
    """All checks of a result: a model that is wrong already is not built, since a repair follows."""
    checks, engine = list(structure), None
    if (
        job.emulated
        and judge.expected is not None
        and (plan is not None or job.precision.precision == "fp32")
    ):
        products = plan is not None and any(one.op in TENSOR_CORE for one in plan.decisions)
        precision = "fp32" if plan is None else plan.precision
        checks.append(judge.emulated(fixed, precision, job.accumulation, products=products))
    wrong = {check.name for check in checks if check.passed is False}
    if "structure" in wrong or (wrong and judge.settings is None) or job.weak_typing:
        return tuple(checks), None
    built, engine = judge.built(fixed, plan)
    return engine_first((*checks, *built)), engine
