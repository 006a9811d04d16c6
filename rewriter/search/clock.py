"""The time that a search was given."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Clock:
    """Counts from the moment at which it is made.

    Attributes:
        seconds: What the whole search may take, the original's outputs and the ranking of nodes included.
        start: By time.monotonic().
    """

    seconds: float
    start: float = field(default_factory=time.monotonic)

    def at(self, share: float) -> float:
        """The time.monotonic() at which this share of the time is over."""
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
