"""The frontier of accuracy and latency: the plans that no other one beats in both."""

from __future__ import annotations

from collections.abc import Sequence

from rewriter.search.candidate import Candidate, added
from rewriter.search.result import Frontier, FrontierPoint
from rewriter.search.trials import Trials


def frontier(trials: Trials, metric: str) -> Frontier:
    """Evaluate 1, 2, 4, ... of the best-ranked nodes in FP32, and all; with what was tried before.

    Raises:
        ArithmeticRunError: ONNX Runtime cannot run the model.
    """
    ranked, size = trials.all_nodes(), 1
    trials.value(Candidate())
    while size < 2 * len(ranked):
        trials.value(added(ranked[:size]))
        size *= 2
    points = [_point(trials, candidate) for candidate in trials.tried()]
    return of_points(points, metric, trials.metric.least, trials.judge.origin)


def of_points(found: Sequence[FrontierPoint], metric: str, least: bool, origin: str) -> Frontier:
    """The frontier of these points; `least`: whether more of the metric is better."""

    def error(point: FrontierPoint) -> float:
        return -point.value if least else point.value

    points = sorted(found, key=lambda p: (p.latency_us, error(p)))
    kept: list[FrontierPoint] = []
    for point in points:
        if not kept or error(point) < error(kept[-1]):
            kept.append(point)
    return Frontier(metric, least, origin, tuple(kept), tuple(points))


def _point(trials: Trials, candidate: Candidate) -> FrontierPoint:
    return FrontierPoint(trials.latency_us(candidate), trials.value(candidate), trials.plan_of(candidate))
