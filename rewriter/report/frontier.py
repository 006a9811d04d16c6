"""Shows the frontier of accuracy against latency: a table, a drawing in characters, and JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from rewriter.report.terminal import new_table
from rewriter.search.pareto import Frontier, FrontierPoint

COLUMNS, ROWS = 60, 12
"""Size of the drawing in characters, without its axes."""

CENTRE = 0.5
"""Position of points on an axis on which all have the same value."""


def sections(found: Frontier) -> Iterator[RenderableType]:
    """The table and the drawing, for the terminal."""
    *numbers, mark = _columns(found)
    title = f"Frontier ({found.metric}; latency {found.origin})"
    yield new_table(title, *numbers, mark, rows=_rows(found), right=numbers)
    yield Text(drawing(found))
    yield ""


def _columns(found: Frontier) -> tuple[str, ...]:
    return "us", "more", found.metric, "FP32", "BF16", ""


def _rows(found: Frontier) -> list[tuple[str, ...]]:
    least = found.points[0].latency_us
    return [
        (
            f"{p.latency_us:.2f}",
            f"{p.latency_us / least - 1.0:+.2%}" if least else "",
            f"{p.value:.3g}",
            str(len(p.plan.fp32)),
            str(len(p.plan.bf16)),
            "applied" if p.plan == found.chosen else "",
        )
        for p in found.points
    ]


@dataclass(frozen=True)
class _Axes:
    """Positions of points from 0 to 1, left to right and bottom to top; `spans` are their limits."""

    x: Callable[[float], float]
    y: Callable[[float], float]
    points: tuple[FrontierPoint, ...]
    spans: tuple[tuple[float, float], tuple[float, float]]


def _axes(found: Frontier) -> _Axes:
    """Axes for all points with a finite value; the error axis is logarithmic."""
    shown = tuple(p for p in found.tried if math.isfinite(p.value))
    times, values = [p.latency_us for p in shown], [p.value for p in shown]
    logarithmic = not found.least and all(v > 0 for v in values)
    return _Axes(
        _scale(times, logarithmic=False), _scale(values, logarithmic), shown, (_span(times), _span(values))
    )


def _span(values: Sequence[float]) -> tuple[float, float]:
    return min(values, default=0.0), max(values, default=0.0)


def _scale(values: Sequence[float], logarithmic: bool) -> Callable[[float], float]:
    change: Callable[[float], float] = math.log if logarithmic else float
    low, high = (change(v) for v in _span(values)) if values else (0.0, 0.0)
    return lambda value: (change(value) - low) / (high - low) if high > low else CENTRE


def drawing(found: Frontier) -> str:
    """The points in ASCII: `o` tried, `*` on the frontier, `@` applied."""
    axes = _axes(found)
    if not axes.points:
        return "All tried plans have NaN or infinity in their outputs."
    cells = [[" "] * COLUMNS for _ in range(ROWS)]
    for mark, points in (("o", axes.points), ("*", found.points), ("@", _applied(found))):
        for point in points:
            if math.isfinite(point.value):
                row = round((1.0 - axes.y(point.value)) * (ROWS - 1))
                cells[row][round(axes.x(point.latency_us) * (COLUMNS - 1))] = mark
    (left, right), (low, high) = axes.spans
    labels = [f"{high:.3g}", *[""] * (ROWS - 2), f"{low:.3g}"]
    lines = [f"{text:>10} |{''.join(row)}".rstrip() for text, row in zip(labels, cells, strict=True)]
    foot = f"{left:.2f}".ljust(COLUMNS - 12) + f"{right:.2f} us".rjust(12)
    return "\n".join([*lines, " " * 11 + "+" + "-" * COLUMNS, " " * 12 + foot])


def _applied(found: Frontier) -> list[FrontierPoint]:
    return [point for point in found.tried if point.plan == found.chosen]


def frontier_dict(found: Frontier) -> dict[str, Any]:
    """The points of the frontier."""
    points = [
        {
            "latency_us": point.latency_us,
            "value": point.value,
            "fp32": len(point.plan.fp32),
            "bf16": len(point.plan.bf16),
            "applied": point.plan == found.chosen,
        }
        for point in found.points
    ]
    return {"metric": found.metric, "least": found.least, "latency": found.origin, "points": points}
