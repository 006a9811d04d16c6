"""Shows progress on the terminal, and makes Ctrl-C reliable."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from rewriter.base.stopwatch import LASTING, Progress
from rewriter.base.text import one_line
from rewriter.report.signals import listening
from rewriter.report.terminal import console

BEAT_SECONDS = 20.0  # time between two lines where no bar can be shown


@contextmanager
def progress(*, shown: bool, lines: bool = False) -> Iterator[Progress]:
    """Shows a transient bar for the current stage on stderr, or lines if that is not a terminal.

    There a line is printed every `BEAT_SECONDS`, and whenever the text of a stage changes that begins with
    `LASTING`: a short job prints nothing, a long one shows that it is alive.

    Args:
        lines: Print every change of the stage's text, on a terminal, too.

    Yields:
        A function of a stage, the amount done, and the total (0: unknown). It raises KeyboardInterrupt if
        the user has pressed Ctrl-C, and SystemExit after SIGTERM.
    """
    stderr, last = console(stderr=True), ""
    with listening() as signals, (_bar if stderr.is_terminal else _beat)(stderr, shown=shown) as draw:

        def update(stage: str, done: int, total: int) -> None:
            nonlocal last
            signals.check()
            stage = one_line(stage)
            printed = lines or (stage.startswith(LASTING) and not stderr.is_terminal)
            if shown and printed and stage and stage != last:
                stderr.print(stage, markup=False, highlight=False, soft_wrap=True)
            last = stage
            draw(stage, done, total)

        yield update


Draw = Callable[[str, int, int], None]


@contextmanager
def _bar(console: Console, *, shown: bool) -> Iterator[Draw]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    left = _TimeLeft()
    with Progress(*columns, console=console, transient=True, disable=not shown) as bars:
        bar = bars.add_task("", total=None)
        yield lambda stage, done, total: bars.update(
            bar, description=stage + left.text(done, total), completed=done, total=total or None
        )


class _TimeLeft:
    """Estimates the time until a stage ends, from its share that is done."""

    def __init__(self) -> None:
        self.done, self.total, self.start = 0, 0, 0.0

    def text(self, done: int, total: int) -> str:
        """`, about 40 s left`; "" where nothing is known."""
        now = time.monotonic()
        if total != self.total or done < self.done or not done:
            self.start = now
        self.done, self.total = done, total
        seconds = (now - self.start) * (total - done) / done if done else 0.0
        return f", about {seconds:.0f} s left" if seconds >= 1.0 else ""


@contextmanager
def _beat(console: Console, *, shown: bool) -> Iterator[Draw]:
    """Prints the stage every `BEAT_SECONDS` until the job is over, also while a library computes."""
    text, over, start, left = "starting", threading.Event(), time.monotonic(), _TimeLeft()

    def draw(stage: str, done: int, total: int) -> None:
        nonlocal text
        progress = f", {done} of {total}" if total else ""
        text = (stage or "starting") + progress + left.text(done, total)

    def beat() -> None:
        while not over.wait(BEAT_SECONDS):
            line = f"{time.monotonic() - start:.0f} s: {text}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    thread = threading.Thread(target=beat, daemon=True)
    if shown:
        thread.start()
    try:
        yield draw
    finally:
        over.set()
        if shown:
            thread.join()
