"""How far something is, and what its stages took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

LASTING = "search: "
"""How stages begin whose news is worth a line of its own where there is no bar to show it in."""


Progress = Callable[[str, int, int], None]
"""Called with a stage, how much of it is done, and of how much (0: not known)."""


@dataclass
class Stopwatch:
    """Wall time by stage; tells the progress callback of each."""

    progress: Progress
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """What is done inside counts as that stage's."""
        self.progress(name, 0, 0)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
