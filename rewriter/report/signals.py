"""Ctrl-C and requests to end: the work stops, temporary files go, and no traceback is shown.

While the command line is being imported there is nothing to clean up, and `rewriter.__main__` just ends the
process. From then on the signals raise exceptions. Extension modules may turn these into others, and the
garbage collector's callbacks may lose them, so the received signal is remembered.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Requests to end; SIGHUP comes when the terminal is closed."""

AGAIN_S = 0.05  # delay after which a signal whose exception was lost in a callback is sent again


class Signals:
    """Handler of the signals that end a command.

    Attributes:
        received: Number of the last one; 0 if none came.
        reported: True if the user has read that the command was interrupted.
    """

    def __init__(self) -> None:
        self.received = 0
        self.reported = False

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        self.received = number
        self.check()

    def check(self) -> None:
        """Raises the exception of the signal: KeyboardInterrupt, or SystemExit with a shell's code."""
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received:
            raise SystemExit(128 + self.received)

    def send_again(self, lost: Any) -> None:
        """A hook for exceptions in callbacks: sends a signal again when the callback has returned."""
        if isinstance(lost.exc_value, (KeyboardInterrupt, SystemExit)) and self.received:
            threading.Timer(AGAIN_S, os.kill, (os.getpid(), self.received)).start()
        else:
            sys.__unraisablehook__(lost)


def current() -> Signals | None:
    """The handler of the innermost `listening`; None outside."""
    handler = signal.getsignal(signal.SIGINT)
    return handler if isinstance(handler, Signals) else None


@contextmanager
def listening() -> Iterator[Signals]:
    """Handles signals in the block, as a part of an outer block if there is one."""
    if outer := current():
        yield outer
        return
    signals = Signals()
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield signals
        return
    numbers = [n for n in (signal.SIGINT, *ENDING) if signal.getsignal(n) is not signal.SIG_IGN]  # nohup
    before = {number: signal.signal(number, signals) for number in numbers}
    hook, sys.unraisablehook = sys.unraisablehook, signals.send_again
    try:
        yield signals
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)
