"""Tries other plans where an engine runs, and hands out what it shows to be better.

The default plan has passes and epilogues that gain accuracy or latency on the networks and GPUs where they
were measured, and lacks one that costs latency on some networks and gains it on others. What is in doubt is
built and timed: Convs as ConvTransposes, and plain FP16 with its hazards kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from rewriter.base import Pass
from rewriter.jobs.fix.attempt import Attempt, measured_steps
from rewriter.jobs.fix.job import FixJob
from rewriter.jobs.fix.record import Record
from rewriter.jobs.fix.rewriting import Rewriting
from rewriter.passes.mixed_precision import MixedPrecision
from rewriter.passes.transpose_convs import TransposeConvs
from rewriter.pipeline.preset_steps import STEPS, inserted
from rewriter.planning import free_fp32
from rewriter.verification.arithmetic_checks import AS_FP32

PLAIN = "trt11-migrate"
"""The preset that changes types, and what they require, alone."""

AFFORDED_S = 60.0
"""No plan is tried that is expected to end later than this after the first one."""

NOISE = 0.02
"""Share of a latency by which two runs of one engine differ."""

Other = tuple[str, FixJob]
"""What is done differently, in words, and the job for that."""


def best_plan(made: Attempt, attempt: Callable[[FixJob], Attempt]) -> tuple[Attempt, str]:
    """Returns the attempt to hand out, and a sentence on it if that is not `made`.

    Another plan is taken if it is faster and as accurate, or as fast and more accurate. Ctrl-C ends that, and
    `made` is the result.

    Args:
        attempt: Runs a job.
    """
    error = made.relative_l2
    if error is None or made.latency_us is None or not _may_change(made):
        return made, ""
    try:
        found = list(_as_accurate(made, attempt, error))
        models = [made.fixed, *(other.fixed for _, other in found)]
        return _best(made, found, made.proof.yardstick.timed_in_turn(models) if found else [])
    except KeyboardInterrupt:
        return made, "interrupted while other plans were tried: this is the rules' plan"


def _as_accurate(
    made: Attempt, attempt: Callable[[FixJob], Attempt], error: float
) -> Iterator[tuple[str, Attempt]]:
    """Yields other plans that err no more than `error`, as far as there is time for them."""
    start = time.monotonic()
    for words, job in _others(made):
        if time.monotonic() - start + _expected_s(made, job) > AFFORDED_S:
            continue
        other = attempt(job)
        if not other.failed and other.relative_l2 is not None and other.relative_l2 <= AS_FP32 * error:
            yield words, other


def _expected_s(made: Attempt, job: FixJob) -> float:
    """Seconds that an attempt at another job takes if its plan takes as long as that of `made`."""
    known = measured_steps(job) == measured_steps(made.job)
    emulated_s = sum(check.seconds for check in made.proof.done if check.name == "emulation")
    return made.planned_s - emulated_s + (0.0 if known else made.measured_s)


def _best(
    made: Attempt, found: Sequence[tuple[str, Attempt]], timed: Sequence[float | None]
) -> tuple[Attempt, str]:
    """Returns the attempt that no other one beats, and a sentence on it.

    Args:
        found: Attempts as accurate as `made`.
        timed: Latencies of `made` and of these, in us; None: it did not run.
    """
    first = us = timed[0] if timed else None
    best, said = made, ""
    for (words, other), other_us in zip(found, timed[1:], strict=True):
        if first is None or us is None or other_us is None:
            continue
        error, other_error = best.relative_l2 or 0.0, other.relative_l2 or 0.0
        more_accurate = other_error * AS_FP32 < error
        if other_error <= AS_FP32 * error and other_us <= (1 + NOISE if more_accurate else 1 - NOISE) * us:
            best, us = other, other_us
            said = (
                f"{words}: {us:.3g} us instead of {first:.3g} us on this GPU, error {other_error:.2g} "
                f"instead of {made.relative_l2:.2g}"
            )
    return best, said


def _may_change(made: Attempt) -> bool:
    """True unless the user chose the passes, the plan or the goal."""
    job, request = made.job, made.job.request
    chosen = request.passes is not None or request.save_plan is not None or not request.repair
    if chosen or made.failed or made.plan is None or job.plan is not None or job.goal is not None:
        return False
    return not job.weak_typing and job.wish.precision == "fp16"


def _others(made: Attempt) -> Iterator[Other]:
    """Yields the plans that are in doubt for this model, first the one that can be more accurate as well."""
    if _transposes(made):
        steps = inserted(made.job.steps, MixedPrecision, TransposeConvs())
        yield f"with {TransposeConvs.name}, which pays here", _measured_alone(made.job, steps)
    plain = _plain(made.job)
    left_out = {step.name for step in made.job.steps} - {step.name for step in plain.steps}
    changed = {result.name for result in made.record.passes if result.changes}
    decisions = made.plan.decisions if made.plan is not None else ()
    if left_out & changed or any(decision.rule == free_fp32.RULE for decision in decisions):
        yield f"without passes and islands that do not pay here (as in {PLAIN})", plain


def _plain(job: FixJob) -> FixJob:
    """The job with those of its steps that plain FP16 has, too, and no epilogues."""
    kinds = {type(step) for step in STEPS[PLAIN]}
    steps = tuple(
        replace(step, epilogues=False) if isinstance(step, MixedPrecision) else step
        for step in job.steps
        if type(step) in kinds
    )
    return _measured_alone(job, steps)


def _measured_alone(job: FixJob, steps: Sequence[Pass]) -> FixJob:
    """The job with other steps, whose engine alone decides: emulating it takes longer than running it."""
    return replace(job, steps=tuple(steps), repairing=True, emulated=False)


def _transposes(made: Attempt) -> bool:
    """True if Convs of the plan can become ConvTransposes, and nobody decided on that."""
    job, kinds = made.job, [type(step) for step in made.job.steps]
    skipped = job.request.skip or ()
    if TransposeConvs in kinds or kinds.count(MixedPrecision) != 1 or TransposeConvs.name in skipped:
        return False
    record = Record(made.record.stage)
    Rewriting(job, record).rewrite(made.structured, (TransposeConvs(),), made.plan)
    return any(result.changes for result in record.passes)
