"""Shows progress on the terminal, and makes Ctrl-C reliable."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from rewriter.model.stopwatch import LASTING
from rewriter.report.signals import listening

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def progress(*, shown: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Shows a transient bar for the current stage on stderr, or lines if that is not a terminal.

    Lines are printed only for stages that begin with `LASTING`, whenever their text changes.

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
    last = ""

    def update(stage: str, _done: int, _total: int) -> None:
        nonlocal last
        if stage.startswith(LASTING) and stage != last:
            last = stage
            console.print(stage, markup=False, highlight=False, soft_wrap=True)

    yield update
