"""Progress and wall time of stages."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

LASTING = "search: "
"""Prefix of stages whose progress is printed line by line where no bar can be shown."""


Progress = Callable[[str, int, int], None]
"""Called with a stage, the amount done, and the total (0: not known)."""


@dataclass
class Stopwatch:
    """Measures wall time by stage and reports each stage to the progress callback."""

    progress: Progress
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Adds the time of the block to the stage."""
        self.progress(name, 0, 0)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def interrupt_handled() -> None:
    """Marks Ctrl-C as acted on, for a handler that remembers signals: the work goes on to its end."""
    handler: Any = signal.getsignal(signal.SIGINT)
    if hasattr(handler, "received"):
        handler.received = 0
