"""The frontier of accuracy and latency: the plans that no other one beats in both."""

from __future__ import annotations

from rewriter.result import Frontier, FrontierPoint
from rewriter.search.trials import Choice, Trials, added


def frontier(trials: Trials, metric: str) -> Frontier:
    """Evaluate 1, 2, 4, ... of the best-ranked nodes in FP32, and all; with what was tried before.

    Raises:
        ArithmeticRunError: ONNX Runtime cannot run the model.
    """
    ranked, size = trials.ranking(), 1
    trials.value(Choice())
    while size < 2 * len(ranked):
        trials.value(added(ranked[:size]))
        size *= 2
    points = sorted(
        (_point(trials, c) for c in trials.tried()), key=lambda p: (p.latency_us, _error(trials, p))
    )
    kept: list[FrontierPoint] = []
    for point in points:
        if not kept or _error(trials, point) < _error(trials, kept[-1]):
            kept.append(point)
    return Frontier(metric, trials.metric.least, trials.judge.origin, tuple(kept), tuple(points))


def _point(trials: Trials, choice: Choice) -> FrontierPoint:
    return FrontierPoint(trials.latency_us(choice), trials.value(choice), trials.plan_of(choice))


def _error(trials: Trials, point: FrontierPoint) -> float:
    """The metric, turned so that less is better."""
    return -point.value if trials.metric.least else point.value
