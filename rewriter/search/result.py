"""Results of a search, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from rewriter.plan import Plan


@dataclass(frozen=True)
class FrontierPoint:
    """A plan that was evaluated.

    Attributes:
        latency_us: Microseconds of one inference.
        value: Of the frontier's metric, the worst over outputs and samples.
    """

    latency_us: float
    value: float
    plan: Plan


@dataclass(frozen=True)
class Frontier:
    """The plans that no other evaluated one beats in both latency and accuracy, fastest first.

    Attributes:
        metric: Name of the measure; `least`: whether more of it is better.
        origin: Where the latencies come from, e.g. "recorded on an H200, not measured here".
        tried: All plans that were evaluated, fastest first.
        chosen: The plan that was applied.
    """

    metric: str
    least: bool
    origin: str
    points: tuple[FrontierPoint, ...]
    tried: tuple[FrontierPoint, ...]
    chosen: Plan | None = None


@dataclass(frozen=True)
class TriedPlan:
    """A plan that a search built and ran.

    Attributes:
        words: What it has that the rules' plan has not, for people.
        value: Of the search's metric, the worst over outputs and samples; infinite if the plan failed.
        latency_us, spread_us: Median, and distance of the quartiles; None and 0 if it failed.
        problem: Why it failed; "" if it did not.
        applied: True for the plan that was chosen.
        untried: True if the time was up before it was measured.
    """

    words: str
    value: float
    latency_us: float | None
    spread_us: float
    problem: str
    plan: Plan
    applied: bool
    untried: bool = False


@dataclass(frozen=True)
class Searched:
    """Plans that a search on an engine tried, in order; the first is the rules' plan.

    Attributes:
        metric: Name of the measure of accuracy.
        origin: What measured, and where.
    """

    metric: str
    origin: str
    tried: tuple[TriedPlan, ...]
