"""Holds a plan to its budget of latency where an engine runs: recorded costs of another GPU may be wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from rewriter.jobs.fix.attempt import Attempt
from rewriter.jobs.fix.job import FixJob
from rewriter.jobs.fix.other_plans import NOISE
from rewriter.search.goal import Budget

SEARCHES = 2
"""Searches for a plan that is cheaper by the recorded costs, before the rules' plan is handed out."""

AFFORDED_S = 120.0
"""No search starts that is expected to end later than this after the first plan was made."""


@dataclass(frozen=True)
class _Timed:
    """A plan, and what it takes more than the rules' plan, as a share of that."""

    made: Attempt
    spent: float


def within_budget(made: Attempt, attempt: Callable[[FixJob], Attempt]) -> tuple[Attempt, str]:
    """Returns the attempt to hand out, and a sentence on it if that is not `made`.

    If the plan takes more on this GPU than it may, another one is searched, for as much less by the recorded
    costs. Ctrl-C ends that, and `made` is the result.

    Args:
        attempt: Runs a job.
    """
    goal = made.job.goal
    if not isinstance(goal, Budget) or made.latency_us is None or made.failed:
        return made, ""
    try:
        rules = attempt(replace(made.job, goal=None))
        spent = _share(rules, made)
        if spent is None or spent <= goal.share + NOISE:
            return made, ""
        others = list(_cheaper(_Timed(made, spent), rules, goal, attempt))
    except KeyboardInterrupt:
        return made, "interrupted while the latency of the plan was measured: it may be beyond its budget"
    wrong = f"on this GPU the plan for {goal.share:.0%} more latency takes {spent:.0%} more"
    cheapest = min([_Timed(made, spent), *others], key=lambda one: one.spent)
    if cheapest.spent <= goal.share + NOISE:
        return cheapest.made, f"{wrong}: this one takes {cheapest.spent:.0%} more"
    if rules.failed:
        return cheapest.made, f"{wrong}, and the rules' plan fails a check"
    rules.record.search = made.record.search
    return rules, f"{wrong}: this is the rules' plan"


def _cheaper(
    latest: _Timed, rules: Attempt, goal: Budget, attempt: Callable[[FixJob], Attempt]
) -> Iterator[_Timed]:
    """Yields plans that pass every check, from searches for smaller and smaller budgets."""
    start, share = time.monotonic(), goal.share
    known = [_decisions(rules), _decisions(latest.made)]
    for _ in range(SEARCHES):
        if time.monotonic() - start + latest.made.planned_s > AFFORDED_S:
            return
        share *= goal.share / latest.spent
        made = attempt(replace(latest.made.job, goal=replace(goal, share=share)))
        spent = _share(rules, made)
        if spent is None or _decisions(made) in known:
            return
        latest = _Timed(made, spent)
        known.append(_decisions(made))
        yield latest
        if spent <= goal.share + NOISE:
            return


def _decisions(made: Attempt) -> object:
    return made.plan.decisions if made.plan is not None else None


def _share(rules: Attempt, made: Attempt) -> float | None:
    """What a plan takes more than the rules' plan, as a share of that; None if it fails a check, or a run."""
    if made.latency_us is None or made.failed:
        return None
    base, us = made.proof.yardstick.timed_in_turn([rules.fixed, made.fixed])
    return None if base is None or us is None else us / base - 1
