"""Holds a plan to its budget of latency where an engine runs: recorded costs of another GPU may be wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rewriter.jobs.fix.attempt import Attempt
from rewriter.jobs.fix.job import FixJob
from rewriter.jobs.fix.other_plans import NOISE
from rewriter.search.goal import Budget

SEARCHES = 2
"""Searches for a plan that is cheaper by the recorded costs, before the rules' plan is handed out."""


REMEDY = "--search gpu times every plan"


def within_budget(made: Attempt, attempt: Callable[[FixJob], Attempt]) -> tuple[Attempt, str]:
    """Returns the attempt to hand out, and a sentence on it if that is not `made`.

    A plan that takes more than its budget on this GPU is searched again, with the budget that by the same
    error of the recorded costs takes what it may. Ctrl-C ends that, and the last plan is the result.

    Args:
        attempt: Runs a job.
    """
    job, goal = made.job, made.job.goal
    if (
        not isinstance(goal, Budget)
        or job.search_engine is not None
        or made.latency_us is None
        or made.failed
    ):
        return made, ""
    allowed, share, first = goal.share, goal.share, made
    try:
        rules = attempt(replace(job, goal=None))
        spent = took = _share(rules, made)
        for _ in range(SEARCHES):
            if spent is None or spent <= allowed + NOISE or made.failed:
                break
            share *= allowed / spent
            made = attempt(replace(job, goal=replace(goal, share=share)))
            spent = _share(rules, made)
    except KeyboardInterrupt:
        return made, "interrupted while the latency of the plan was measured: it may be beyond its budget"
    if took is None or made is first:
        return first, ""
    wrong = f"on this GPU the plan for {allowed:.0%} more latency takes {took:.0%} more"
    if not made.failed and spent is not None and spent <= allowed + NOISE:
        return made, f"{wrong}: this one was searched for {share:.1%}, by recorded costs; {REMEDY}"
    if rules.failed:
        return first, f"{wrong}, and the rules' plan fails a check; {REMEDY}"
    return rules, f"{wrong}: this is the rules' plan; {REMEDY}"


def _share(rules: Attempt, made: Attempt) -> float | None:
    """What the plan takes more than the rules' plan, as a share of that; None if that is not known."""
    if made.latency_us is None or made.failed:
        return None
    base, us = made.proof.yardstick.timed_in_turn([rules.fixed, made.fixed])
    return None if base is None or us is None else us / base - 1
