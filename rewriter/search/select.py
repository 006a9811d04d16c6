"""Chooses the best of the measured plans for a goal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rewriter.plan import Plan
from rewriter.search.candidate import Group
from rewriter.search.goal import Budget, ErrorLimit, Goal
from rewriter.search.tried_plans import Measured, TriedPlan

LEAST_DIFFERENCE = 0.01
"""Relative difference in latency of two builds of one network (H200, TensorRT-RTX 1.6.1): less is noise."""

ALIKE = 0.05
"""Relative difference of two errors that is noise: another build sums in another order."""


@dataclass(frozen=True)
class Trial:
    """A plan that was judged.

    Attributes:
        groups: Its differences from the rules' plan.
        least: True if more of the metric is better.
    """

    groups: tuple[Group, ...]
    plan: Plan
    worth: Measured
    least: bool

    @property
    def works(self) -> bool:
        return self.worth.latency_us is not None and math.isfinite(self.worth.value)

    @property
    def us(self) -> float:
        """The latency; infinity if the plan failed."""
        return math.inf if self.worth.latency_us is None else self.worth.latency_us

    @property
    def error(self) -> float:
        """The metric, negated if more of it is better."""
        return -self.worth.value if self.least else self.worth.value

    @property
    def words(self) -> str:
        return " + ".join(group.words for group in self.groups) or "the rules' plan"

    @property
    def untried(self) -> bool:
        """True if the time was up before it was judged."""
        return self.worth.untried

    def noise(self, other: Trial) -> float:
        """Returns the largest difference of two latencies, in microseconds, that is noise."""
        return max(LEAST_DIFFERENCE * min(self.us, other.us), self.worth.spread_us, other.worth.spread_us)

    def as_row(self, best: Trial) -> TriedPlan:
        return TriedPlan(**vars(self.worth), words=self.words, plan=self.plan, applied=self is best)


def chosen(tried: Sequence[Trial], goal: Goal) -> Trial:
    """Returns the best plan; the rules' plan, which comes first, if no other is better beyond the noise.

    Of the plans that fulfil the goal equally well, the one with the better second figure wins, then the one
    that was tried first.
    """
    base, working = tried[0], [one for one in tried if one.works]
    if not working:
        return base
    return min(working, key=lambda one: objective(one, base, goal))


def objective(one: Trial, base: Trial, goal: Goal) -> tuple[float, ...]:
    """Returns a key that is smallest for the best plan."""
    if isinstance(goal, ErrorLimit):
        return _for_tolerance(one, base, goal)
    return _for_budget(one, base, goal.share) if isinstance(goal, Budget) else _for_speed(one, base)


def _for_tolerance(one: Trial, base: Trial, goal: ErrorLimit) -> tuple[float, ...]:
    """Prefers the fastest plan that meets the limit; if none does, the most accurate."""
    if not goal.meets(one.worth.value):
        return 1.0, one.error, one.us
    return 0.0, _steps(one, base), _error_steps(one, base)


def _for_budget(one: Trial, base: Trial, share: float) -> tuple[float, ...]:
    """Prefers the most accurate plan in the budget; if the rules' plan fails, the fastest."""
    limit = base.us * (1.0 + share) if base.works else math.inf
    return float(one.us > limit), _error_steps(one, base), _steps(one, base)


def _for_speed(one: Trial, base: Trial) -> tuple[float, ...]:
    """Prefers the fastest plan that is no less accurate; if none is faster, the most accurate."""
    if not base.works:
        return 0.0, one.us, one.error
    worse = _error_steps(one, base) > 0.0
    slower = one.us > base.us + one.noise(base)
    return float(worse or slower), _steps(one, base), _error_steps(one, base)


def _steps(one: Trial, base: Trial) -> float:
    """Returns the difference of a latency from the rules' plan's, in steps of the noise."""
    if not base.works or not math.isfinite(one.us):
        return one.us
    if abs(one.us - base.us) <= one.noise(base):
        return 0.0
    step = max(LEAST_DIFFERENCE * base.us, base.worth.spread_us) or 1.0
    return float(math.trunc((one.us - base.us) / step))


def _error_steps(one: Trial, base: Trial) -> float:
    """Returns the difference of an error from the rules' plan's, in steps of its noise."""
    if not base.works or one.least or base.error <= 0.0 or one.error <= 0.0:
        return one.error
    return float(math.trunc(math.log(one.error / base.error) / math.log1p(ALIKE)))
