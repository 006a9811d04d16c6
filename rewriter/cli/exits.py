"""Ends a command: its report, its exit code, and its message on stderr.

Exit codes: 0 fixed and verified, or nothing found; 1 verification failed, or `scan --fail-on` found
something, or `locate` or `compare-inputs` a difference; 2 bad usage or bad model, nothing written, or
a report that could not be written;
70 a defect of this program (EX_SOFTWARE of sysexits.h); 130 interrupted (128 + SIGINT); 143 ended by SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import typer

from rewriter.cli.echo import echo
from rewriter.errors import OutputError, RewriterError
from rewriter.report import signals

FAILED, BAD_INPUT, DEFECT, INTERRUPTED = 1, 2, 70, 130

MEMORY = "take smaller samples, or a machine with more memory; save large weights as external data"


@contextmanager
def exit_codes() -> Iterator[None]:
    """Prints errors of ours to stderr as they read; anything else is a defect and shows its traceback."""
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except KeyboardInterrupt as interrupt:
        _stop(f"interrupted: {interrupt}" if str(interrupt) else "interrupted", INTERRUPTED)
    except Exception as error:
        if (handler := signals.current()) and handler.received:  # what it became in an extension module
            _end(handler.received)
        if isinstance(error, RewriterError):
            _stop(f"error: {error}", BAD_INPUT)
        if isinstance(error, MemoryError):
            _stop(
                f"error: memory ran out{f': {error}' if str(error) else ''}\n  what to do: {MEMORY}",
                BAD_INPUT,
            )
        echo(traceback.format_exc().rstrip(), err=True)
        _stop("this is a defect of rewriter: please report it with the lines above", DEFECT)


def _end(number: int) -> NoReturn:
    if number == signal.SIGINT:
        _stop("interrupted", INTERRUPTED)
    raise SystemExit(128 + number)


def _stop(message: str, code: int) -> NoReturn:
    echo(message, err=True)
    raise typer.Exit(code) from None


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Ignores a closed pipe: `| head` may have read enough, and the exit code still gives the verdict."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more


def show(result: Any, report: ModuleType, files: Iterable[Callable[[], object]] = (), **options: Any) -> None:
    """Writes the files of a result, and prints it even if a file cannot be written.

    Args:
        report: The module of `rewriter.report` for the command.
        files: Each writes one file.
        options: Of its `print_result`.

    Raises:
        OutputError: a file cannot be written; the message says that the model was, if it was.
    """
    from rewriter.report.terminal import console

    failures = []
    for write in files:
        try:
            write()
        except OutputError as error:
            failures.append(error)
    with reader_may_leave():
        report.print_result(result, console(), **options)
    for failure in failures:
        model = getattr(result, "output", None)
        also = f"; the model was written to {model}" if model else ""
        hint = failure.hint or "name another file"
        raise OutputError(failure.what + also, where=failure.where, hint=hint)


def as_json(result: Any, report: ModuleType, path: Path | None) -> Iterator[Callable[[], object]]:
    """Yields the function that writes a result as JSON, if a file is named."""
    from rewriter.model import write_json

    if path is not None:
        yield lambda: write_json(report.as_dict(result), path)
