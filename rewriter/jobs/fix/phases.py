"""Splits a pipeline into the phases of a run, and checks its order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rewriter.ir.base import Pass, Stage
from rewriter.ir.errors import UsageError


@dataclass(frozen=True)
class Phases:
    """The passes of a pipeline by when they run.

    Attributes:
        structural: Run before ranges are measured.
        measuring: From the first pass that reads ranges; they run before the plan is made.
        lowering: From the pass that carries the plan out.
    """

    structural: tuple[Pass, ...]
    measuring: tuple[Pass, ...]
    lowering: tuple[Pass, ...]

    @classmethod
    def of(cls, steps: Sequence[Pass]) -> Phases:
        """Splits the pipeline, in order.

        Raises:
            UsageError: a pass stands before one that it has to follow.
        """
        _check_order(steps)
        lowering = _first(steps, len(steps), Stage.LOWERING)
        measuring = _first(steps, lowering, Stage.RANGES)
        bounds = (0, measuring, lowering, len(steps))
        return cls(*(tuple(steps[a:b]) for a, b in pairwise(bounds)))


def _first(steps: Sequence[Pass], end: int, stage: Stage) -> int:
    """Returns the place of the first pass of that stage before `end`; `end` if there is none."""
    return next((place for place, step in enumerate(steps[:end]) if step.stage is stage), end)


def _check_order(steps: Sequence[Pass]) -> None:
    for place, step in enumerate(steps):
        for other in steps[place + 1 :]:
            if Stage.STRUCTURE < other.stage < step.stage:
                hint = f"name {step.name} after {other.name}"
                raise UsageError(f"{step.name} has to follow {other.name}", where="`passes`", hint=hint)
