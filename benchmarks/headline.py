"""Sums up the side by side in one table: error and latency of each model, and their ratios to AutoCast's."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.comparison import worst
from benchmarks.variants import CHECKED

Row = dict[str, Any]
Value = Callable[[Row], float | None]

RIVAL = "autocast"
OURS = ("fix", CHECKED, "fix-accurate", "fix-accurate-50")
SHOWN = {
    RIVAL: RIVAL,
    "fix": "fix",
    CHECKED: CHECKED,
    "fix-accurate": "fix-accurate",
    "fix-accurate-50": "fix-accurate-50",
    "naive": "naive",
    "fp32": "FP32 (TF32)",
}
"""Variants of the table and their titles in it."""


class Found:
    """Rows by model and variant, of those for which an engine gave outputs."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._by = {(r["model"], r["variant"]): r for r in rows if engine_error(r) is not None}
        self.models = list(dict.fromkeys(model for model, _ in self._by))

    def has(self, variant: str) -> bool:
        return any(found == variant for _, found in self._by)

    def error(self, model: str, variant: str) -> float | None:
        """The worst output's relative L2 error; infinity if not finite; None if it did not run."""
        return engine_error(self._by.get((model, variant), {}))

    def latency(self, model: str, variant: str) -> float | None:
        """Latency in us; None if it was not measured."""
        return latency(self._by.get((model, variant), {}))


def engine_error(row: Row) -> float | None:
    return worst(row.get("engine"))


def latency(row: Row) -> float | None:
    found: float | None = row.get("engine", {}).get("latency_us")
    return found


def mean(ratios: Sequence[float]) -> float:
    """Geometric mean."""
    return math.exp(math.fsum(math.log(max(r, 1e-9)) for r in ratios) / len(ratios))


def ratio(ours: float | None, rival: float | None) -> float | None:
    """`ours` over `rival`; None if one is missing or not finite."""
    if ours is None or not rival or not math.isfinite(ours) or not math.isfinite(rival):
        return None
    return ours / rival


def ratios(found: Found, variant: str) -> Mapping[str, tuple[float | None, float | None]]:
    """A variant's error and latency relative to AutoCast's, for each model."""
    return {
        model: (
            ratio(found.error(model, variant), found.error(model, RIVAL)),
            ratio(found.latency(model, variant), found.latency(model, RIVAL)),
        )
        for model in found.models
    }


def table(rows: Sequence[Row]) -> str:
    """Error and latency of each model, and the geometric means of their ratios to AutoCast's."""
    found = Found(rows)
    shown = [v for v in SHOWN if found.has(v)]
    head = ["model", *(f"error: {SHOWN[v]}" for v in shown), *(f"us: {SHOWN[v]}" for v in shown)]
    head += ["fix in AutoCast's: error", "latency"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    pairs = ratios(found, "fix")
    for model in found.models:
        cells = [_error(found.error(model, v)) for v in shown]
        cells += ["" if (us := found.latency(model, v)) is None else f"{us:g}" for v in shown]
        cells += ["" if r is None else f"{r:.2f}" for r in pairs[model]]
        lines.append("| " + " | ".join([model, *cells]) + " |")
    means = [_mean(found, v, which) for which in (0, 1) for v in shown]
    lines.append("| " + " | ".join(["geometric mean of ratios to AutoCast's", *means, "", ""]) + " |")
    return "\n".join(lines)


def _mean(found: Found, variant: str, which: int) -> str:
    """Mean ratio to AutoCast's; with the number of models if some have none, because a result is not finite."""
    known = [r for pair in ratios(found, variant).values() if (r := pair[which]) is not None]
    if variant == RIVAL or not known:
        return ""
    return f"**{mean(known):.3f}**" + ("" if len(known) == len(found.models) else f" ({len(known)} models)")


def _error(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1e}" if math.isfinite(value) else "not finite"
