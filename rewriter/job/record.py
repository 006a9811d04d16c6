"""What the stages of a run tell its result."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rewriter.base import Rescaled, Spent
from rewriter.driver import PassResult
from rewriter.job.options import Progress
from rewriter.search.stage import Answer


@dataclass
class Record:
    """It grows from stage to stage.

    Attributes:
        progress: Is told when a stage begins.
        passes: In the order in which they ran.
        warnings: Sentences that the user should read.
        seconds: What each stage took.
        search: What the search found; None if there was none.
    """

    progress: Progress
    passes: list[PassResult] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    search: Answer | None = None

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """What is done inside counts as that stage's."""
        self.progress(name, 0, 0)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def exponents(self) -> tuple[tuple[int, str, int], ...]:
        """What was multiplied by a power of two so far, in the order of the changes."""
        changes = (change for result in self.passes for change in result.changes)
        return tuple(e for change in changes if isinstance(change, Rescaled) for e in change.exponents)

    def spent_us(self) -> float:
        """What passes have spent of a budget of latency, as estimated."""
        changes = (change for result in self.passes for change in result.changes)
        return sum(change.us for change in changes if isinstance(change, Spent))
