"""Shows the frontier of accuracy against latency: a table, a drawing in characters, SVG, HTML and JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from rewriter.errors import UsageError
from rewriter.model import write_text
from rewriter.report.terminal import new_table
from rewriter.search.pareto import Frontier, FrontierPoint

COLUMNS, ROWS = 60, 12
"""Size of the drawing in characters, without its axes."""

WIDTH, HEIGHT, MARGIN = 720, 440, 70
"""Size of the SVG in pixels."""

SUFFIXES = (".svg", ".html")

CENTRE = 0.5
"""Position of points on an axis on which all have the same value."""


def check_path(path: Path) -> None:
    """Refuse a file that is neither SVG nor HTML.

    Raises:
        UsageError: its name does not end in .svg or .html.
    """
    if path.suffix.lower() not in SUFFIXES:
        hint = "use the suffix .svg, or .html for a page with the table, too"
        raise UsageError("the suffix is not .svg or .html", where=f"--pareto {path}", hint=hint)


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


def write(found: Frontier, path: Path) -> None:
    """Write the drawing; an HTML page contains the table, too, and needs no other file.

    Raises:
        UsageError: the name ends in neither .svg nor .html.
        OutputError: the file cannot be written.
    """
    check_path(path)
    write_text(svg(found) if path.suffix.lower() == ".svg" else _page(found), path)


def svg(found: Frontier) -> str:
    """The drawing as a self-contained SVG; hovering over a point shows its numbers."""
    axes = _axes(found)
    (left, right), (low, high) = axes.spans

    def at(point: FrontierPoint) -> tuple[float, float]:
        return (
            MARGIN + axes.x(point.latency_us) * (WIDTH - 2 * MARGIN),
            MARGIN + (1.0 - axes.y(point.value)) * (HEIGHT - 2 * MARGIN),
        )

    line = [at(p) for p in found.points if math.isfinite(p.value)]
    parts = [_label(WIDTH / 2, 30, f"{found.metric} against latency ({found.origin})", "middle")]
    bottom, end = HEIGHT - MARGIN + 20, WIDTH - MARGIN
    parts += [
        f'<path d="M{MARGIN - 20} {MARGIN - 20}V{bottom}H{end + 20}" fill="none" stroke="#888"/>',
        _label(MARGIN - 25, MARGIN, f"{high:.3g}", "end"),
        _label(MARGIN - 25, HEIGHT - MARGIN, f"{low:.3g}", "end"),
        _label(MARGIN, bottom + 20, f"{left:.2f} us", "middle"),
        _label(end, bottom + 20, f"{right:.2f} us", "middle"),
        '<polyline fill="none" stroke="#27c" points="'
        + " ".join(f"{x:.1f},{y:.1f}" for x, y in line)
        + '"/>',
    ]
    parts += [_dot(*at(p), _color(found, p), p) for p in axes.points]
    body = "\n".join(parts)
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return f'{head}\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'


def _color(found: Frontier, point: FrontierPoint) -> str:
    if point.plan == found.chosen:
        return "#d33"
    return "#27c" if point in found.points else "#bbb"


def _dot(x: float, y: float, color: str, point: FrontierPoint) -> str:
    title = f"{point.value:.3g} at {point.latency_us:.2f} us, {len(point.plan.fp32)} nodes in FP32"
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{color}"><title>{title}</title></circle>'


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{escape(text, quote=False)}</text>'


def _cells(tag: str, texts: Iterable[str]) -> str:
    return "".join(f"<{tag}>{escape(text, quote=False)}" for text in texts)


def _page(found: Frontier) -> str:
    """The drawing and the table as one HTML page."""
    head = _cells("th", _columns(found))
    rows = "\n".join("<tr>" + _cells("td", row) for row in _rows(found))
    style = "body{font-family:sans-serif} td,th{padding:2px 12px;text-align:right}"
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>Frontier</title>'
        f"<style>{style}</style>\n{svg(found)}<table>\n<tr>{head}\n{rows}\n</table></html>\n"
    )


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
