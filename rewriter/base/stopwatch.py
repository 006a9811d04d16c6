"""Progress and wall time of stages, and the deadline of a block of work."""

import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

LASTING = "search: "
"""Prefix of stages whose progress is printed line by line where no bar can be shown."""

LONG_S = 10.0  # processor seconds of a stage from which its progress names them

_deadline: ContextVar[float] = ContextVar("deadline", default=math.inf)
"""When the work of this block ends, by `time.monotonic`."""


class OutOfTimeError(BaseException):
    """The deadline of a block has passed. As KeyboardInterrupt, it is no failure of the work that it ends."""


@contextmanager
def within(deadline: float) -> Iterator[None]:
    """Ends the work of the block at a deadline, by `time.monotonic`, with an OutOfTimeError.

    An earlier deadline stays. Workers are ended while they compute; Python code ends at its next stage.
    """
    token = _deadline.set(min(deadline, _deadline.get()))
    try:
        yield
    finally:
        _deadline.reset(token)


def without_deadline() -> None:
    """Takes the deadline away in a fork, which may outlive the block that it began in."""
    _deadline.set(math.inf)


def seconds_left() -> float:
    """The seconds until the deadline, infinite without one; an OutOfTimeError after it."""
    if (left := _deadline.get() - time.monotonic()) <= 0.0:
        raise OutOfTimeError
    return left


Progress = Callable[[str, int, int], None]
"""Called with a stage, the amount done, and the total (0: not known)."""


def silent(stage: str, done: int, total: int) -> None:
    """A `Progress` that reports nothing."""


@dataclass
class Stopwatch:
    """Measures wall time by stage and reports each to the progress callback, as a step of the whole run.

    `steps` are the stages of the run, in their order. `trying` is reported instead of them while a candidate
    is tried, which goes through several of them once more.
    """

    progress: Progress
    steps: Sequence[str] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    trying: str = ""
    reached: int = 0

    @contextmanager
    def __call__(self, name: str, core_s: float = 0.0) -> Iterator[None]:
        """Adds the time of the block to the stage; it may need so many seconds of a core."""
        self.report(name, detail=f", up to {core_s:.0f} s of a core" if core_s >= LONG_S else "")
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def report(self, name: str, done: int = 0, total: int = 0, detail: str = "") -> None:
        """Reports how much of a stage is done; its number never falls, though a run may come back to it.

        Raises:
            OutOfTimeError: the deadline of the block has passed.
        """
        seconds_left()
        if name in self.steps:
            self.reached = max(self.reached, 1 + self.steps.index(name))
        step = f"{self.reached} of {len(self.steps)}, " if self.steps else ""
        self.progress(self.trying or f"{step}{name}{detail}", done, total)


def interrupt_handled() -> None:
    """Marks Ctrl-C as acted on, for a handler that remembers signals: the work goes on to its end."""
    handler: Any = signal.getsignal(signal.SIGINT)
    if hasattr(handler, "received"):
        handler.received = 0


def raise_signal() -> None:
    """Raises what Ctrl-C or a request to end raised, if an extension module made another exception of it."""
    handler: Any = signal.getsignal(signal.SIGINT)
    if hasattr(handler, "check"):
        handler.check()
