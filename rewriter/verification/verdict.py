"""Checks and the verdict that they add up to."""

from __future__ import annotations

from dataclasses import dataclass

from rewriter.figures.compare import OutputComparison

GOALS = frozenset({"tolerance", "max-latency-cost", "search"})
"""Checks that say whether a search reached what it was asked for; they verify nothing of what is written."""


@dataclass(frozen=True)
class Check:
    """One step of verification: `structure`, `emulation` or `build`; or what became of a goal of `GOALS`.

    `passed` is None when the step could not be done; `summary` then says why.
    """

    name: str
    passed: bool | None
    summary: str
    outputs: tuple[OutputComparison, ...] = ()
    details: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """The checks that were made."""

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """At least one check was made and none failed."""
        return any(c.passed for c in self.checks) and all(c.passed is not False for c in self.checks)
