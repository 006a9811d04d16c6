"""Collects what the stages of a run contribute to its result."""

from __future__ import annotations

from dataclasses import dataclass, field

from rewriter.base import Rescaled
from rewriter.model.stopwatch import Stopwatch
from rewriter.pipeline.driver import PassResult
from rewriter.search.run import SearchOutcome


@dataclass
class Record:
    """It grows from stage to stage.

    Attributes:
        stage: Counts what is done inside as that stage's.
        passes: In the order in which they ran.
        warnings: Sentences that the user should read.
        search: What the search found; None if there was none.
    """

    stage: Stopwatch
    passes: list[PassResult] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    search: SearchOutcome | None = None

    def exponents(self) -> tuple[tuple[int, str, int], ...]:
        """Returns the tensors multiplied by a power of two so far, in the order of the changes."""
        changes = (change for result in self.passes for change in result.changes)
        return tuple(e for change in changes if isinstance(change, Rescaled) for e in change.exponents)
