"""Runs the models of a batch on this machine, some at a time."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from rewriter.batch import memory
from rewriter.batch.child import Child, fix_order
from rewriter.batch.entry import Entry, Outcome
from rewriter.batch.run import Display, Fixed
from rewriter.batch.staging import land, workspace
from rewriter.errors import OutputError

POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Limits:
    """What a batch may use on this machine.

    Attributes:
        jobs: Models at a time.
        memory_bytes: For all of them together; 0: no limit.
        seconds: Deadline of each model.
    """

    jobs: int
    memory_bytes: int
    seconds: float


class _Running:
    """A model with its child process and its folder."""

    def __init__(self, entry: Entry, needed: int, seconds: float) -> None:
        self.entry, self.needed = entry, needed
        with ExitStack() as stack:
            folder = stack.enter_context(workspace(entry))
            self.result = folder / "result"
            order = fix_order(entry.model, self.result / entry.output.name, entry.options, seconds)
            self.child = Child(order, folder / "scratch")
            stack.callback(self.child.stop)
            self.close = stack.pop_all().close

    def poll(self) -> Outcome | None:
        """The outcome when the model has ended and its result is in place."""
        outcome = self.child.poll()
        if outcome is None:
            return None
        try:
            return land(self.entry, outcome, self.result)
        except OutputError as error:
            return replace(outcome, ending="refused", text=str(error))


class Processes:
    """Runs models in child processes of this machine."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    def fix(self, entries: Sequence[Entry], display: Display) -> Generator[Fixed, None, None]:
        """Yields each model with its outcome as it ends; closing the generator stops those that run.

        A model starts if its estimated memory is left, or if nothing else runs: one that is larger than the
        whole budget runs alone.
        """
        waiting, running = [(entry, memory.needed(entry.model)) for entry in entries], list[_Running]()
        try:
            while waiting or running:
                display.tick()
                while (place := _next(waiting, running, self.limits)) is not None:
                    entry, needed = waiting.pop(place)
                    running.append(_Running(entry, needed, self.limits.seconds))
                    display.started(entry)
                for one in list(running):
                    outcome = one.poll()
                    if outcome is not None:
                        running.remove(one)
                        one.close()
                        yield one.entry, outcome
                time.sleep(POLL_SECONDS)
        finally:
            for one in running:
                one.close()


def _next(waiting: Sequence[tuple[Entry, int]], running: Sequence[_Running], limits: Limits) -> int | None:
    """The first model in the queue that may start now."""
    if not waiting or len(running) >= limits.jobs:
        return None
    left = limits.memory_bytes - sum(one.needed for one in running)
    fitting = (i for i, (_, needed) in enumerate(waiting) if not limits.memory_bytes or needed <= left)
    return next(fitting, None if running else 0)
