"""Compares emulated errors with the engines' errors: the same variants, emulated on a CPU and run on a GPU."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.comparison import worst
from benchmarks.headline import Row, engine_error, mean

FACTOR = 2.0
"""An emulated error within this factor of the engine's counts as right."""


@dataclass(frozen=True)
class Pair:
    """Worst relative L2 errors of one variant of one model, emulated and measured; infinity if not finite."""

    name: str
    emulated: float
    engine: float

    @property
    def surprising(self) -> bool:
        """True if only one of the two is finite."""
        return math.isfinite(self.emulated) != math.isfinite(self.engine)

    @property
    def quotient(self) -> float | None:
        """The engine's error over the emulated one; None if either is not finite or the latter is zero."""
        known = math.isfinite(self.emulated + self.engine) and self.emulated > 0
        return self.engine / self.emulated if known else None


@dataclass(frozen=True)
class Agreement:
    """All pairs for one type of sums, and the number of measured variants that were not emulated so."""

    pairs: tuple[Pair, ...]
    missing: int

    @property
    def surprises(self) -> list[Pair]:
        return [pair for pair in self.pairs if pair.surprising]

    @property
    def quotients(self) -> list[float]:
        return [q for pair in self.pairs if (q := pair.quotient) is not None]

    @property
    def outside(self) -> list[tuple[str, float]]:
        """Names and quotients beyond the factor, furthest first."""
        found = [(pair.name, q) for pair in self.pairs if (q := pair.quotient) is not None]
        beyond = [(name, q) for name, q in found if not 1 / FACTOR <= q <= FACTOR]
        return sorted(beyond, key=lambda one: -abs(math.log(max(one[1], 1e-9))))

    @property
    def share(self) -> float | None:
        """Share of the comparable pairs that are within the factor, 0 to 1; None if there are none."""
        return 1 - len(self.outside) / len(self.quotients) if self.quotients else None


def agreement_of(rows: Sequence[Row], sums: str) -> Agreement:
    """Pairs of all variants that ran, without FP32 originals, emulated with sums in `sums` ("fp16", "fp32")."""
    ran = [row for row in rows if not row["variant"].startswith("fp32") and engine_error(row) is not None]
    pairs = []
    for row in ran:
        emulated, engine = worst(row.get(f"emulated_{sums}")), engine_error(row)
        if emulated is not None and engine is not None:
            pairs.append(Pair(f"{row['model']} {row['variant']}", emulated, engine))
    return Agreement(tuple(pairs), len(ran) - len(pairs))


def agreement_text(rows: Sequence[Row], defaults: Mapping[str, Any]) -> str:
    """Lines for the page: the criterion on FP16 sums, the variants beyond it, FP32 sums, and `rewriter`'s defaults."""
    fp16, fp32 = agreement_of(rows, "fp16"), agreement_of(rows, "fp32")
    lines = [_criterion(fp16)]
    lines += [_quotients(found, sums) for found, sums in ((fp16, "FP16"), (fp32, "FP32")) if found.quotients]
    if fp16.surprises:
        lines.append("Finite on one side alone: " + ", ".join(pair.name for pair in fp16.surprises) + ".")
    if fp16.outside:
        named = ", ".join(f"{name} {q:.1f}" for name, q in fp16.outside)
        lines.append(f"Beyond the factor, as the engine's error in the emulated one: {named}.")
    if defaults:
        words = {name: sums.upper() if sums.startswith("fp") else sums for name, sums in defaults.items()}
        by = "; ".join(f"`rewriter {name}` in {sums}" for name, sums in words.items())
        lines.append(f"What sums in which type by default when it emulates: {by} (`--accumulation`).")
    return "\n".join(lines)


def _criterion(found: Agreement) -> str:
    if not found.pairs:
        return "Emulation with FP16 sums against engine: nothing was measured."
    ran = len(found.pairs)
    text = (
        "Emulation with FP16 sums against engine: finite or not agrees on "
        f"{ran - len(found.surprises)} of {ran}; error within a factor of {FACTOR:g}"
    )
    share = found.share
    text += ": nothing to compare." if share is None else f" on {share:.0%} of {len(found.quotients)}."
    if found.missing:
        text += f" {found.missing} more variants ran, but were not emulated so."
    return text.replace("%", " %")


def _quotients(found: Agreement, sums: str) -> str:
    known = found.quotients
    return (
        f"With {sums} sums the engine's error is {mean(known):.2f} times the emulated one (geometric mean of "
        f"{len(known)}; {min(known):.2f} to {max(known):.2f})."
    )
