"""Splits a pipeline into the phases of a run, and checks its order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        adapting: From the first pass that a search runs for each candidate.
        lowering: From the pass that carries the plan out.
    """

    structural: tuple[Pass, ...]
    measuring: tuple[Pass, ...]
    adapting: tuple[Pass, ...]
    lowering: tuple[Pass, ...]

    @classmethod
    def of(cls, steps: Sequence[Pass]) -> Phases:
        """Splits the pipeline, in order.

        Raises:
            UsageError: a pass stands before one that it has to follow.
        """
        _check_order(steps)
        lowering = _first(steps, len(steps), lambda stage: stage is Stage.LOWERING)
        adapting = _first(steps, lowering, lambda stage: stage is Stage.ADAPTING)
        measuring = _first(steps, adapting, lambda stage: stage is Stage.RANGES)
        bounds = (0, measuring, adapting, lowering, len(steps))
        return cls(*(tuple(steps[a:b]) for a, b in pairwise(bounds)))


def _first(steps: Sequence[Pass], end: int, wanted: Callable[[Stage], bool]) -> int:
    """Returns the place of the first pass of such a stage before `end`; `end` if there is none."""
    return next((place for place, step in enumerate(steps[:end]) if wanted(step.stage)), end)


def _check_order(steps: Sequence[Pass]) -> None:
    for place, step in enumerate(steps):
        for other in steps[place + 1 :]:
            if Stage.STRUCTURE < other.stage < step.stage:
                hint = f"name {step.name} after {other.name}"
                raise UsageError(f"{step.name} has to follow {other.name}", where="`passes`", hint=hint)
