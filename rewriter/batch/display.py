"""Shows the progress of a batch: one bar with the models that run, or a line for each that ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rewriter.batch.entry import Entry, Record
from rewriter.report.signals import listening

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID


class Lines:
    """A line on stderr for each model that ended; the base of the bar."""

    def __init__(self, console: Console, total: int, check: Callable[[], None], *, shown: bool) -> None:
        self.console, self.total, self.check, self.shown = console, total, check, shown
        self.done = 0

    def started(self, entry: Entry, gpu: str = "") -> None:
        """Nothing: the end is the news."""

    def ended(self, record: Record, gpu: str = "") -> None:
        """Prints the line."""
        self.done += not gpu
        outcome = record.verdicts[gpu] if gpu else record.outcome
        when = "earlier" if record.skipped else f"{outcome.seconds:.1f} s"
        on = f" on {gpu}" if gpu else ""
        text = f"[{self.done}/{self.total}] {record.entry.name}{on}: {outcome.ending}, {when}"
        if self.shown:
            self.console.print(text, soft_wrap=True)

    def tick(self) -> None:
        """Raises KeyboardInterrupt after Ctrl-C."""
        self.check()


class Bars(Lines):
    """A bar of the whole batch, and a line for each model that runs, below the lines."""

    def __init__(self, bars: Progress, total: int, check: Callable[[], None]) -> None:
        super().__init__(bars.console, total, check, shown=True)
        self.bars = bars
        self.whole = bars.add_task("all models", total=total)
        self.running: dict[tuple[str, str], TaskID] = {}

    def started(self, entry: Entry, gpu: str = "") -> None:
        """Adds the line of a model."""
        on = f" on {gpu}" if gpu else ""
        self.running[entry.name, gpu] = self.bars.add_task(f"{entry.name}{on}", total=None)

    def ended(self, record: Record, gpu: str = "") -> None:
        """Removes the line of a model, and moves the bar."""
        task = self.running.pop((record.entry.name, gpu), None)
        if task is not None:
            self.bars.remove_task(task)
        super().ended(record, gpu)
        self.bars.update(self.whole, completed=self.done)


@contextmanager
def display(total: int, *, shown: bool) -> Iterator[Lines]:
    """Shows the progress of `total` models on stderr; Ctrl-C and requests to end come out of `tick`."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from rewriter.report.terminal import console

    stderr = console(stderr=True)
    with listening() as signals:
        if not (shown and stderr.is_terminal):
            yield Lines(stderr, total, signals.check, shown=shown)
            return
        name = TextColumn("{task.description}", markup=False)
        columns = (name, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=stderr, transient=True) as bars:
            yield Bars(bars, total, signals.check)
