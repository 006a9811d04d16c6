"""The frontier of accuracy and latency: the plans that no other plan beats in both."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rewriter.plan import Plan


@dataclass(frozen=True)
class FrontierPoint:
    """A plan that was evaluated.

    Attributes:
        latency_us: Microseconds of one inference.
        value: The frontier's metric, the worst over outputs and samples.
    """

    latency_us: float
    value: float
    plan: Plan


@dataclass(frozen=True)
class Frontier:
    """The plans that no other evaluated plan beats in both latency and accuracy, fastest first.

    Attributes:
        metric: Name of the measure.
        least: True if more of the metric is better.
        origin: Source of the latencies, e.g. "recorded on an H200, not measured here".
        tried: All plans that were evaluated, fastest first.
        chosen: The plan that was applied.
    """

    metric: str
    least: bool
    origin: str
    points: tuple[FrontierPoint, ...]
    tried: tuple[FrontierPoint, ...]
    chosen: Plan | None = None


def frontier_of(
    found: Iterable[FrontierPoint], metric: str, least: bool, origin: str, chosen: Plan | None = None
) -> Frontier:
    """Returns the frontier of evaluated plans; `least` is True if more of the metric is better."""

    def error(point: FrontierPoint) -> float:
        return -point.value if least else point.value

    points = sorted(found, key=lambda p: (p.latency_us, error(p)))
    kept: list[FrontierPoint] = []
    for point in points:
        if not kept or error(point) < error(kept[-1]):
            kept.append(point)
    return Frontier(metric, least, origin, tuple(kept), tuple(points), chosen)
