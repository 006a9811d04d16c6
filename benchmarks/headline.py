"""What the side by side comes to: error and latency of each model in one table, and how far the emulation is right."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.preparation import worst
from benchmarks.variants import SEARCHED

Row = dict[str, Any]
Value = Callable[[Row], float | None]

RIVAL = "autocast"
OURS = ("fix", "fix-rescaled", "fix-epilogues", "fix-accurate", SEARCHED)
SHOWN = (RIVAL, *OURS, "naive")
FACTOR = 2.0
"""An emulated error within this factor of the engine's is called right."""


def engine_error(row: Row) -> float | None:
    return worst(row.get("engine"))


def latency(row: Row) -> float | None:
    found: float | None = row.get("engine", {}).get("latency_us")
    return found


def mean(ratios: Sequence[float]) -> float:
    """Geometric."""
    return math.exp(math.fsum(math.log(max(r, 1e-9)) for r in ratios) / len(ratios))


def table(rows: Sequence[Row]) -> str:
    """Error and latency of each model, and the geometric means of their ratios to AutoCast's."""
    by = {(r["model"], r["variant"]): r for r in rows if engine_error(r) is not None}
    models = list(dict.fromkeys(model for model, _ in by))
    shown = [v for v in SHOWN if any((m, v) in by for m in models)]
    columns: list[tuple[str, str, Value]] = [(f"error: {v}", v, engine_error) for v in shown]
    columns += [(f"us: {v}", v, latency) for v in shown]
    head = ["model", *(title for title, _, _ in columns), "fix in AutoCast's: error", "latency"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for model in models:
        cells = [_cell(value(by.get((model, v), {})), value is latency) for _, v, value in columns]
        pair = [_ratio(by, model, "fix", value) for value in (engine_error, latency)]
        cells += ["" if r is None else f"{r:.2f}" for r in pair]
        lines.append("| " + " | ".join([model, *cells]) + " |")
    means = ["" if v == RIVAL else _means(by, models, v, value) for _, v, value in columns]
    lines.append("| " + " | ".join(["geometric mean of ratios to AutoCast's", *means, "", ""]) + " |")
    return "\n".join(lines)


def _ratio(by: dict[tuple[str, str], Row], model: str, variant: str, value: Value) -> float | None:
    ours, rival = value(by.get((model, variant), {})), value(by.get((model, RIVAL), {}))
    if ours is None or not rival or not math.isfinite(ours) or not math.isfinite(rival):
        return None
    return ours / rival


def _means(by: dict[tuple[str, str], Row], models: Sequence[str], variant: str, value: Value) -> str:
    """With the number of models where that is not all: a result that is not finite has no ratio."""
    ratios = [r for m in models if (r := _ratio(by, m, variant, value)) is not None]
    if not ratios:
        return ""
    return f"**{mean(ratios):.3f}**" + ("" if len(ratios) == len(models) else f" ({len(ratios)} models)")


def _cell(value: float | None, plain: bool) -> str:
    if value is None:
        return ""
    return f"{value:g}" if plain else f"{value:.1e}" if math.isfinite(value) else "not finite"


def agreement(rows: Sequence[Row]) -> str:
    """How well the emulation foretold the engines of all FP16 variants, and where it did not."""
    known = []
    for row in rows:
        (foretold, sums), engine = _emulated(row), engine_error(row)
        if not row["variant"].startswith("fp32") and foretold is not None and engine is not None:
            known.append((f"{row['model']} {row['variant']}", sums, foretold, engine))
    if not known:
        return "Emulation against engine: nothing was measured."
    surprises = [name for name, _, a, b in known if math.isfinite(a) != math.isfinite(b)]
    both = [(name, sums, b / a) for name, sums, a, b in known if math.isfinite(a + b) and a > 0]
    outside = [(name, q) for name, _, q in both if not 1 / FACTOR <= q <= FACTOR]
    share = (
        f" on {100 * (1 - len(outside) / len(both)):.0f} % of {len(both)}" if both else ": nothing to compare"
    )
    lines = [
        f"Emulation against engine: finite or not agrees on {len(known) - len(surprises)} of {len(known)}; error within "
        f"a factor of {FACTOR:g}{share}."
    ]
    for sums in ("fp16", "fp32"):
        if found := [q for _, s, q in both if s == sums]:
            lines.append(
                f"With {sums.upper()} sums the engine's error is {mean(found):.2f} times the emulated one (geometric mean "
                f"of {len(found)}; {min(found):.2f} to {max(found):.2f})."
            )
    if surprises:
        lines.append("Finite on one side alone: " + ", ".join(surprises) + ".")
    if outside:
        outside.sort(key=lambda found: -abs(math.log(found[1])))
        named = ", ".join(f"{name} {q:.1f}" for name, q in outside)
        lines.append(f"Beyond the factor, as the engine's error in the emulated one: {named}.")
    return "\n".join(lines)


def _emulated(row: Row) -> tuple[float | None, str]:
    """The emulated error and the type of its sums: FP16 where that was measured."""
    found = worst(row.get("emulated_fp16"))
    return (found, "fp16") if found is not None else (worst(row.get("emulated_fp32")), "fp32")
