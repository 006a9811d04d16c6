"""Hands out plain FP16 with its hazards kept where an engine shows that the rest of the plan does not pay.

The default plan has passes and epilogues that gain accuracy or latency on the networks and GPUs where they
were measured. On others they may cost either. Where an engine runs, it is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rewriter.jobs.fix.attempt import Attempt
from rewriter.jobs.fix.job import FixJob
from rewriter.passes.mixed_precision import MixedPrecision
from rewriter.pipeline.preset_steps import STEPS
from rewriter.planning import free_fp32
from rewriter.verification.arithmetic_checks import AS_FP32

PLAIN = "trt11-migrate"
"""The preset that changes types, and what they require, alone."""

AFFORDED_S = 60.0
"""Longest attempt that is followed by one more: what is in doubt must not cost more."""

NOISE = 0.02
"""Share of a latency by which two runs of one engine differ."""


def plain_instead(made: Attempt, attempt: Callable[[FixJob], Attempt], seconds: float) -> tuple[Attempt, str]:
    """Returns the attempt to hand out, and a sentence on it if that is not `made`.

    Plain FP16 is taken if it is faster and as accurate, or as fast and more accurate.

    Args:
        attempt: Runs a job.
        seconds: What `made` took.
    """
    error, other_job = made.relative_l2, _plain(made.job)
    slow = made.latency_us is None or seconds > AFFORDED_S
    if error is None or slow or not _in_doubt(made, other_job):
        return made, ""
    other = attempt(other_job)
    if other.failed or other.relative_l2 is None or other.relative_l2 > AS_FP32 * error:
        return made, ""
    ours, plain = made.proof.yardstick.timed_in_turn([made.fixed, other.fixed])
    if ours is None or plain is None:
        return made, ""
    more_accurate = other.relative_l2 * AS_FP32 < error
    if plain > (1 + NOISE if more_accurate else 1 - NOISE) * ours:
        return made, ""
    return other, (
        f"without passes and islands that do not pay on this GPU (as in {PLAIN}): {plain:.3g} us instead of "
        f"{ours:.3g} us, error {other.relative_l2:.2g} instead of {error:.2g}"
    )


def _plain(job: FixJob) -> FixJob:
    """The job with those of its steps that plain FP16 has, too, and no epilogues."""
    kinds = {type(step) for step in STEPS[PLAIN]}
    steps = tuple(
        replace(step, epilogues=False) if isinstance(step, MixedPrecision) else step
        for step in job.steps
        if type(step) in kinds
    )
    return replace(job, steps=steps, repairing=True)


def _in_doubt(made: Attempt, other: FixJob) -> bool:
    """True if a step or rule that plain FP16 lacks did something, and nobody asked for it by name."""
    job, request = made.job, made.job.request
    asked = request.passes is not None or request.save_plan is not None or not request.repair
    if asked or made.failed or made.plan is None or job.plan is not None or job.goal is not None:
        return False
    if job.weak_typing or job.wish.precision != "fp16":
        return False
    left_out = {step.name for step in job.steps} - {step.name for step in other.steps}
    changed = {result.name for result in made.record.passes if result.changes}
    return bool(left_out & changed) or any(d.rule == free_fp32.RULE for d in made.plan.decisions)
