"""The plot of accuracy against latency."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rewriter.english import count
from rewriter.figures.metrics import named
from rewriter.report.html.scales import decades, linear, logarithmic, power_of_ten, round_steps, widened
from rewriter.report.html.view import Point, Scatter, Tick
from rewriter.search.pareto import Frontier
from rewriter.search.tried_plans import Searched

LEFT, RIGHT, TOP, BOTTOM = 70.0, 700.0, 20.0, 290.0
"""Edges of the plot in a drawing of 720 x 350."""

LEGEND = {"tried": "tried", "best": "on the frontier: nothing tried beats it in both", "applied": "applied"}


@dataclass(frozen=True)
class _Plan:
    us: float
    value: float
    kind: str
    text: str


def frontier_plot(found: Frontier) -> Scatter | None:
    """Returns the plot of the plans that were evaluated; None if none has finite errors."""
    best = set(map(id, found.points))
    plans = [
        _Plan(
            p.latency_us,
            p.value,
            "applied" if p.plan == found.chosen else "best" if id(p) in best else "tried",
            f"{len(p.plan.fp32)} nodes in FP32" + (f", {len(p.plan.bf16)} in BF16" if p.plan.bf16 else ""),
        )
        for p in found.tried
    ]
    return _plot("frontier", plans, found.metric, found.least, found.origin)


def searched_plot(found: Searched) -> Scatter | None:
    """Returns the plot of the plans that were built and measured; None if none has finite errors."""
    plans = [
        _Plan(one.latency_us, one.value, "applied" if one.applied else "tried", one.words)
        for one in found.tried
        if one.latency_us is not None and one.value is not None
    ]
    return _plot("searched", plans, found.metric, named(found.metric).least, found.origin)


def _plot(name: str, plans: Sequence[_Plan], metric: str, least: bool, origin: str) -> Scatter | None:
    plans = [plan for plan in plans if math.isfinite(plan.value) and math.isfinite(plan.us)]
    if not plans:
        return None
    times = widened([plan.us for plan in plans], 0.08)
    x = linear(*times, LEFT, RIGHT)
    y, y_ticks = value_axis([plan.value for plan in plans], least)
    line = sorted((plan for plan in _frontier(plans, least)), key=lambda plan: plan.us)
    order = ("tried", "best", "applied")
    drawn = sorted(plans, key=lambda plan: (order.index(plan.kind), plan.us))
    better = "more is better" if least else "less is better"
    return Scatter(
        id=name,
        summary=_summary(drawn, metric, better, origin),
        x_label=f"latency in µs ({origin})",
        y_label=f"{metric} ({better})",
        x_ticks=[Tick(x(value), f"{value:.6g}") for value in round_steps(*times, 8)],
        y_ticks=y_ticks,
        points=[
            Point(x(p.us), y(p.value), p.kind, f"{p.text}: {metric} {p.value:.3g} at {p.us:.1f} µs")
            for p in drawn
        ],
        line="M" + "L".join(f"{x(p.us):.1f} {y(p.value):.1f}" for p in line),
        legend=[(kind, LEGEND[kind]) for kind in order if any(p.kind == kind for p in plans)],
    )


def _summary(plans: Sequence[_Plan], metric: str, better: str, origin: str) -> str:
    """The plot in figures, for those who do not see it."""
    values, times = [plan.value for plan in plans], [plan.us for plan in plans]
    parts = [
        f"{count(len(plans), 'plan')}: {metric} ({better}) from {min(values):.3g} to {max(values):.3g}",
        f"latency from {min(times):.1f} to {max(times):.1f} µs ({origin})",
        *(f"applied: {p.text} with {p.value:.3g} at {p.us:.1f} µs" for p in plans if p.kind == "applied"),
    ]
    return "; ".join(parts) + "."


def _frontier(plans: Sequence[_Plan], least: bool) -> list[_Plan]:
    """The plans that no other beats in both."""
    kept: list[_Plan] = []
    for plan in sorted(plans, key=lambda p: (p.us, -p.value if least else p.value)):
        if not kept or (plan.value > kept[-1].value if least else plan.value < kept[-1].value):
            kept.append(plan)
    return kept


def value_axis(values: Sequence[float], least: bool) -> tuple[Callable[[float], float], list[Tick]]:
    """The axis of the metric: logarithmic for errors, linear for what should be large, or may be 0."""
    if least or min(values) <= 0.0:
        span = widened(values, 0.1)
        y = linear(*span, BOTTOM, TOP)
        return y, [Tick(y(value), f"{value:.4g}") for value in round_steps(*span, 6)]
    low, high = min(values) / 1.5, max(values) * 1.5
    y = logarithmic(low, high, BOTTOM, TOP)
    marks = decades(low, high, 6)
    if len(marks) < 2:
        return y, [Tick(y(value), f"{value:.3g}") for value in round_steps(low, high, 6) if value > 0.0]
    return y, [Tick(y(value), power_of_ten(value)) for value in marks]
