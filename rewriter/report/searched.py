"""Shows the plans that a search built and measured, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType

from rewriter.report.terminal import new_table
from rewriter.search.tried_plans import Searched, TriedPlan


def sections(found: Searched) -> Iterator[RenderableType]:
    """A table of the plans."""
    base = found.tried[0].latency_us
    numbers = (found.metric, "us", "+-", "more", "FP32")
    rows = ((one.words, *_figures(one, base), _note(one)) for one in found.tried)
    yield new_table(f"Plans tried ({found.origin})", "plan", *numbers, "", rows=rows, right=numbers)
    yield ""


def _note(one: TriedPlan) -> str:
    return "applied" if one.applied else one.problem.partition("\n")[0]


def _figures(one: TriedPlan, base: float | None) -> tuple[str, str, str, str, str]:
    count = str(len(one.plan.fp32))
    if one.latency_us is None:
        return "", "", "", "", count
    more = f"{one.latency_us / base - 1.0:+.1%}" if base else ""
    return f"{one.value:.3g}", f"{one.latency_us:.1f}", f"{one.spread_us:.1f}", more, count


def searched_dict(found: Searched) -> dict[str, Any]:
    """Every plan that was tried, with its measurements."""
    tried = [
        {
            "plan": one.words,
            "value": one.value,
            "latency_us": one.latency_us,
            "spread_us": one.spread_us,
            "fp32": len(one.plan.fp32),
            "bf16": len(one.plan.bf16),
            "problem": one.problem,
            "applied": one.applied,
            "untried": one.untried,
        }
        for one in found.tried
    ]
    return {"metric": found.metric, "measured": found.origin, "tried": tried}
