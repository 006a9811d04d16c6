"""Checks, and the verdict of all of them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rewriter.engines.protocol import Latency
from rewriter.figures.outputs import OutputComparison, OutputStatistics
from rewriter.figures.pictures import Picture

GOALS = frozenset({"tolerance", "max-latency-cost", "search"})
"""Checks of a search's goal, which verify nothing about the written model."""

LOG_LINES = 15
"""Lines of a dead child's log that are reported."""


@dataclass(frozen=True)
class Check:
    """One step of verification, such as `structure`, `emulation`, `build` and `run`, or a goal of `GOALS`.

    `passed` is None if the step was impossible; `summary` then gives the reason.

    Attributes:
        latency: Of the engine that `run` timed.
        statistics: Errors of each output in its worst sample, of the arrays that `outputs` compares.
        pictures: The same samples of outputs that look like images.
    """

    name: str
    passed: bool | None
    summary: str
    outputs: tuple[OutputComparison, ...] = ()
    details: tuple[str, ...] = ()
    seconds: float = 0.0
    statistics: tuple[OutputStatistics, ...] = ()
    pictures: tuple[Picture, ...] = ()
    latency: Latency | None = None


@dataclass(frozen=True)
class Verdict:
    """All checks of one model."""

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """At least one check was made and none failed."""
        return any(c.passed for c in self.checks) and all(c.passed is not False for c in self.checks)


def log_lines(log: str) -> tuple[str, ...]:
    """Returns the library's last lines in a child's log, as details, without the Python stack after them."""
    native = re.split(r"Fatal Python error|Traceback \(most recent call last\)", log)[0]
    lines = [line for line in native.splitlines() if line.strip()]
    return tuple(f"log: {line}" for line in lines[-LOG_LINES:])
