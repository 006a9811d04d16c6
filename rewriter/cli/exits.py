"""Ends a command: its report, its exit code, and its message on stderr.

Exit codes: 0 fixed and verified, or nothing found; 1 verification failed, or `scan --fail-on` found
something, or `locate` or `compare-inputs` a difference; 2 bad usage or bad model, nothing written;
70 a defect of this program (EX_SOFTWARE of sysexits.h); 130 interrupted (128 + SIGINT).
"""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import typer

from rewriter.errors import RewriterError

FAILED, BAD_INPUT, DEFECT, INTERRUPTED = 1, 2, 70, 130


@contextmanager
def exit_codes() -> Iterator[None]:
    """Prints errors of ours to stderr as they read; anything else is a defect and shows its traceback."""
    try:
        yield
    except RewriterError as error:
        _stop(f"error: {error}", BAD_INPUT)
    except KeyboardInterrupt as interrupt:
        _stop(f"interrupted: {interrupt}" if str(interrupt) else "interrupted", INTERRUPTED)
    except (typer.Exit, typer.Abort):
        raise
    except Exception:
        traceback.print_exc()
        _stop("this is a defect of rewriter: please report it with the lines above", DEFECT)


def _stop(message: str, code: int) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(code) from None


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Ignores a closed pipe: `| head` may have read enough, and the exit code still gives the verdict."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more


STDOUT = Path("-")
"""The file that stands for the standard output."""

PAGES = (".html", ".htm")
"""Suffixes of a report that is a page; any other report is JSON."""


def is_page(path: Path) -> bool:
    """True if the name of a report asks for a page."""
    return path.suffix.lower() in PAGES


def write_page(result: Any, path: Path) -> None:
    """Write the page of a result, with the command that repeats it."""
    from rewriter.report import html

    html.write(result, path, shlex.join(["rewriter", *sys.argv[1:]]))


def show(
    result: Any, report: ModuleType, json: Path | None, written: Path | None = None, **options: Any
) -> None:
    """Write a result to the files that are named, and print it: on stderr if JSON goes to stdout.

    Args:
        report: The module of `rewriter.report` for the command.
        json: File for JSON.
        written: File for a page, or for JSON: its suffix decides.
        options: Of its `print_result`.
    """
    from rewriter.report.terminal import console

    if written is not None and is_page(written):
        write_page(result, written)
        written = None
    for path in (json, written):
        if path is not None:
            write_document(report.as_dict(result), path)
    with reader_may_leave():
        report.print_result(result, console(stderr=STDOUT in (json, written)), **options)


def write_document(content: Any, json: Path) -> None:
    """Write JSON to a file, or to the standard output."""
    from json import dumps

    from rewriter.model import write_json

    if json != STDOUT:
        write_json(content, json)
        return
    with reader_may_leave():
        typer.echo(dumps(content, indent=2, allow_nan=False, ensure_ascii=False))
