"""Plans that a search tried, with their measurements."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rewriter.figures.metrics import Metric
from rewriter.plan import Plan


@dataclass(frozen=True)
class Measured:
    """The metric and the latency of a plan.

    Attributes:
        value: The metric, the worst over all outputs and samples; the worst possible if the plan failed.
        latency_us: Microseconds of one inference (the median); None if the plan failed.
        spread_us: Distance of the quartiles; 0 for an estimate.
        problem: The reason of a failure; "" if there was none.
        untried: True if time ran out before it was tried.
    """

    value: float
    latency_us: float | None
    spread_us: float = 0.0
    problem: str = ""
    untried: bool = False

    @classmethod
    def failed(cls, metric: Metric, problem: str, *, untried: bool = False) -> Measured:
        return cls(-math.inf if metric.least else math.inf, None, 0.0, problem, untried)


Judged = tuple[int, Measured]
"""The index of a plan in a request, and its evaluation."""


@dataclass(frozen=True, kw_only=True)
class TriedPlan(Measured):
    """A plan that a search built and ran.

    Attributes:
        words: Its differences from the rules' plan, for people.
        applied: True for the plan that was chosen.
    """

    words: str
    plan: Plan
    applied: bool


@dataclass(frozen=True)
class Searched:
    """Plans that a search on an engine tried, in order; the first is the rules' plan.

    Attributes:
        metric: Name of the measure of accuracy.
        origin: The engine and device of the measurements.
    """

    metric: str
    origin: str
    tried: tuple[TriedPlan, ...]
