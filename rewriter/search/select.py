"""Chooses the best of the measured plans for an goal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rewriter.plan import Plan
from rewriter.search.candidate import Group
from rewriter.search.evaluator import Measured
from rewriter.search.goal import Budget, ErrorLimit, Goal
from rewriter.search.result import TriedPlan
from rewriter.search.trials import Types

LEAST_DIFFERENCE = 0.01
"""Share of the latency that two builds of one network differ by: less is noise (H200, TensorRT-RTX 1.6.1)."""

ALIKE = 0.05
"""Share of an error that is noise: another build sums in another order."""


@dataclass(frozen=True)
class Trial:
    """A plan that was judged.

    Attributes:
        groups: What it has on top of the rules' plan.
        least: True if more of the metric is better.
    """

    groups: tuple[Group, ...]
    plan: Plan
    worth: Measured
    least: bool

    @property
    def types(self) -> Types:
        return self.plan.fp32, self.plan.bf16

    @property
    def works(self) -> bool:
        return self.worth.latency_us is not None and math.isfinite(self.worth.value)

    @property
    def us(self) -> float:
        """Its latency; infinity if it failed."""
        return math.inf if self.worth.latency_us is None else self.worth.latency_us

    @property
    def error(self) -> float:
        """The metric, turned so that less is better."""
        return -self.worth.value if self.least else self.worth.value

    @property
    def words(self) -> str:
        return " + ".join(group.words for group in self.groups) or "the rules' plan"

    @property
    def untried(self) -> bool:
        """True if the time was up before it was judged."""
        return self.worth.untried

    def noise(self, other: Trial) -> float:
        """Microseconds by which two latencies have to differ to be different."""
        return max(LEAST_DIFFERENCE * min(self.us, other.us), self.worth.spread_us, other.worth.spread_us)

    def as_row(self, best: Trial) -> TriedPlan:
        worth = self.worth
        return TriedPlan(
            self.words,
            worth.value,
            worth.latency_us,
            worth.spread_us,
            worth.problem,
            self.plan,
            self is best,
            worth.untried,
        )


def chosen(tried: Sequence[Trial], goal: Goal) -> Trial:
    """The best plan; the rules', which is the first, if no other works or all else is noise.

    Of those that fulfil the goal best, within the noise, the one that is better in the other respect, and of
    those that are equal within the noise that which was tried first: the rules', if it is one of them.
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
    """The fastest that meets it; if none does, the most accurate."""
    if not goal.meets(one.worth.value):
        return 1.0, one.error, one.us
    return 0.0, _steps(one, base), _error_steps(one, base)


def _for_budget(one: Trial, base: Trial, share: float) -> tuple[float, ...]:
    """The most accurate in the budget; if even the rules' plan does not work, the fastest."""
    limit = base.us * (1.0 + share) if base.works else math.inf
    return float(one.us > limit), _error_steps(one, base), _steps(one, base)


def _for_speed(one: Trial, base: Trial) -> tuple[float, ...]:
    """The fastest that is no less accurate than the rules' plan; if none is faster, the most accurate."""
    if not base.works:
        return 0.0, one.us, one.error
    worse = _error_steps(one, base) > 0.0
    slower = one.us > base.us + one.noise(base)
    return float(worse or slower), _steps(one, base), _error_steps(one, base)


def _steps(one: Trial, base: Trial) -> float:
    """A latency in steps of the noise, from that of the rules' plan on, so that what is noise is equal."""
    if not base.works or not math.isfinite(one.us):
        return one.us
    if abs(one.us - base.us) <= one.noise(base):
        return 0.0
    step = max(LEAST_DIFFERENCE * base.us, base.worth.spread_us) or 1.0
    return float(math.trunc((one.us - base.us) / step))


def _error_steps(one: Trial, base: Trial) -> float:
    """An error in steps of its noise, from that of the rules' plan on."""
    if not base.works or one.least or base.error <= 0.0 or one.error <= 0.0:
        return one.error
    return float(math.trunc(math.log(one.error / base.error) / math.log1p(ALIKE)))
