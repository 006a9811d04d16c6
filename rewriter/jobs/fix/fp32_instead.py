"""Hands out all of a model in FP32 where that is both faster and more accurate than its plan.

Reduced precision need not pay: a network of many small kernels, or a plan with most products in FP32, may be
slower than its own FP32 engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from math import fsum

from rewriter.jobs.fix.attempt import Attempt
from rewriter.jobs.fix.job import FixJob
from rewriter.jobs.fix.repair import in_fp32
from rewriter.model import facts as tensor_facts
from rewriter.planning.costs.estimate import priced
from rewriter.planning.costs.node_times import ORIGIN

CLEAR = 0.8
"""Largest share of a plan's estimated latency at which FP32 is faster for certain: the estimate of FP32 is
0.83 to 1.51 times the measured latency where that of the plan is known (docs/plans.md)."""

WORTH_US = 10.0
"""Least estimated gain in us that is believed without an engine: below it launches decide, not arithmetic."""

IN_DOUBT = 1.5
"""Largest share at which an engine is asked: beyond it FP32 is slower for certain, by the same figures."""


def fp32_instead(made: Attempt, attempt: Callable[[FixJob], Attempt]) -> tuple[Attempt, str]:
    """Returns the attempt to hand out, and a sentence on it if that is not `made`.

    Where an engine ran the plan, FP32 is built and timed, too, unless it is certain to be slower.

    Args:
        attempt: Runs a job.
    """
    job, plan = made.job, made.plan
    if plan is None or job.plan is not None or job.weak_typing or not job.request.repair or made.failed:
        return made, ""
    if job.request.save_plan is not None:  # who wants the plan wants the model that it makes
        return made, ""
    timed = made.latency_us
    planned, fp32 = _estimated_us(made)
    if fp32 > (CLEAR if timed is None else IN_DOUBT) * planned:
        return made, ""
    if timed is None and planned - fp32 < WORTH_US:
        return made, ""
    other = attempt(in_fp32(job))
    errors = made.relative_l2, other.relative_l2
    if other.failed or errors[0] is None or errors[1] is None or errors[1] >= errors[0]:
        return made, ""
    if timed is not None:
        if other.latency_us is None or other.latency_us >= timed:
            return made, ""
        figures, source = (timed, other.latency_us), "measured"
    else:
        figures, source = (planned, fp32), f"estimated, {ORIGIN}"
    low = plan.precision.upper()
    return other, (
        f"all of it is FP32, which is faster and more accurate here than {low} with islands: "
        f"{figures[1]:.3g} us instead of {figures[0]:.3g} us ({source}), error {errors[1]:.2g} instead of "
        f"{errors[0]:.2g}"
    )


def _estimated_us(made: Attempt) -> tuple[float, float]:
    """The recorded costs of the plan and of FP32 altogether, at the shapes of the judging sample."""
    if made.plan is None:
        return math.inf, math.inf
    facts = tensor_facts.at_sizes(made.structured, made.proof.yardstick.judging[0])
    prices = priced(made.structured, facts, made.job.target)
    broken = fsum(attention.us for attention in prices.attentions)
    return prices.total_us(made.plan), fsum(prices.base.values()) + fsum(prices.own.values()) + broken
