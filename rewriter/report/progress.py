"""Shows progress on the terminal, and makes Ctrl-C reliable."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rewriter.ir.model.stopwatch import LASTING
from rewriter.report.signals import listening

if TYPE_CHECKING:
    from rich.console import Console


BEAT_SECONDS = 20.0
"""Time between two lines where no bar can be shown."""


@contextmanager
def progress(*, shown: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Shows a transient bar for the current stage on stderr, or lines if that is not a terminal.

    A line is printed every `BEAT_SECONDS`, and whenever the text of a stage changes that begins with
    `LASTING`: a short job prints nothing, a long one shows that it is alive.

    Yields:
        A function of a stage, the amount done, and the total (0: unknown). It raises KeyboardInterrupt if
        the user has pressed Ctrl-C, and SystemExit after SIGTERM.
    """
    from rewriter.report.terminal import console

    stderr = console(stderr=True)
    bar = nullcontext() if not shown else _bar(stderr) if stderr.is_terminal else _lines(stderr)
    with listening() as signals, bar as draw:

        def update(stage: str, done: int, total: int) -> None:
            signals.check()
            if draw is not None:
                draw(stage, done, total)

        yield update


@contextmanager
def _bar(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task("", total=None)
        yield lambda stage, done, total: bars.update(
            bar, description=stage, completed=done, total=total or None
        )


@contextmanager
def _lines(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    state, over = _State(), threading.Event()
    beat = threading.Thread(target=_beat, args=(console, state, over), daemon=True)
    beat.start()

    def update(stage: str, done: int, total: int) -> None:
        if stage.startswith(LASTING) and stage != state.stage:
            console.print(stage, markup=False, highlight=False, soft_wrap=True)
        state.stage, state.done, state.total = stage, done, total

    try:
        yield update
    finally:
        over.set()
        beat.join()


@dataclass
class _State:
    """The stage that is running, and how much of it is done."""

    stage: str = ""
    done: int = 0
    total: int = 0

    @property
    def text(self) -> str:
        of = f", {self.done} of {self.total}" if self.total else ""
        return f"{self.stage or 'starting'}{of}"


def _beat(console: Console, state: _State, over: threading.Event) -> None:
    """Prints the stage every `BEAT_SECONDS` until the job is over, also while a library computes."""
    start = time.monotonic()
    while not over.wait(BEAT_SECONDS):
        text = f"{time.monotonic() - start:.0f} s: {state.text}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
