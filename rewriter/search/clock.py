"""The time limit of a search."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Clock:
    """Counts from its creation.

    Attributes:
        seconds: Limit for the whole search, the original's outputs and the ranking of nodes included.
        start: time.monotonic() at the start.
    """

    seconds: float
    start: float = field(default_factory=time.monotonic)

    def at(self, share: float) -> float:
        """Returns the time.monotonic() at which this share of the time is over."""
        return self.start + share * self.seconds

    @property
    def end(self) -> float:
        return self.at(1.0)

    @property
    def spent(self) -> float:
        """Seconds."""
        return time.monotonic() - self.start

    @property
    def left(self) -> float:
        """Seconds; 0 if the time is up."""
        return max(0.0, self.end - time.monotonic())
