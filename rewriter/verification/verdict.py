"""Checks, and the verdict of all of them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rewriter.figures.outputs import OutputComparison

GOALS = frozenset({"tolerance", "max-latency-cost", "search"})
"""Checks of a search's goal; they verify nothing about the model that is written."""

LOG_LINES = 15
"""Lines of a dead child's log that are shown."""


@dataclass(frozen=True)
class Check:
    """One step of verification, such as `structure`, `emulation`, `build` and `run`, or a goal of `GOALS`.

    `passed` is None if the step could not be done; `summary` then gives the reason.
    """

    name: str
    passed: bool | None
    summary: str
    outputs: tuple[OutputComparison, ...] = ()
    details: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """All checks of one model."""

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """At least one check was made and none failed."""
        return any(c.passed for c in self.checks) and all(c.passed is not False for c in self.checks)


def log_lines(log: str) -> tuple[str, ...]:
    """The last lines of the library in a child's log, as details; the Python stack after them is left out."""
    native = re.split(r"Fatal Python error|Traceback \(most recent call last\)", log)[0]
    lines = [line for line in native.splitlines() if line.strip()]
    return tuple(f"log: {line}" for line in lines[-LOG_LINES:])
