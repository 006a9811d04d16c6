"""Ends a command: its report, its exit code, and its message on stderr.

Exit codes: 0 fixed and verified, or nothing found; 1 verification failed, or `scan --fail-on` found
something, or `locate` or `compare-inputs` a difference; 2 bad usage or bad model, nothing written, or
a report that could not be written; 3 TensorRT cannot build the original model; 70 a defect of this
program (EX_SOFTWARE of sysexits.h); 130 interrupted (128 + SIGINT); 143 ended by SIGTERM.
"""

import os
import signal
import sys
import textwrap
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedWriter, FileIO, TextIOWrapper
from json import dumps
from pathlib import Path
from typing import Any, NoReturn

import typer

from rewriter.base.errors import RewriterError, UnbuildableError
from rewriter.base.text import one_line
from rewriter.report import signals

FAILED, BAD_INPUT, UNBUILDABLE, DEFECT, INTERRUPTED = 1, 2, 3, 70, 130

MEMORY = "take smaller samples, or a machine with more memory; save large weights as external data"


def echo(*lines: str, err: bool = False) -> None:
    """Prints lines on stdout or stderr; control characters and line ends from files are escaped."""
    typer.echo("\n".join(map(one_line, lines)), err=err)


def print_error(error: RewriterError) -> None:
    """Prints an error of ours on stderr, with options as the command line has them."""
    from rewriter.pipeline.options import with_flags

    echo(*with_flags(f"error: {error}").split("\n"), err=True)


@contextmanager
def exit_codes() -> Iterator[None]:
    """Prints our errors to stderr without a traceback; any other exception is a defect, and shows it."""
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except KeyboardInterrupt as interrupt:
        _interrupted(str(interrupt))
    except Exception as error:
        if (handler := signals.current()) and handler.received:  # what it became in an extension module
            if handler.received == signal.SIGINT:
                _interrupted("")
            raise SystemExit(128 + handler.received) from None
        if isinstance(error, RewriterError):
            print_error(error)
            raise typer.Exit(UNBUILDABLE if isinstance(error, UnbuildableError) else BAD_INPUT) from None
        if isinstance(error, OSError) and not _in_a_folder():
            hint = "  what to do: go to one that exists"
            _stop("error: the working folder was removed", hint, code=BAD_INPUT)
        if isinstance(error, MemoryError):
            _stop(f"error: memory ran out: {error}", f"  what to do: {MEMORY}", code=BAD_INPUT)
        echo(*textwrap.indent(traceback.format_exc().rstrip(), "  ").splitlines(), err=True)
        _stop("this is a defect of rewriter: please report it with the lines above", code=DEFECT)


def _in_a_folder() -> bool:
    """False if the working folder was removed, and names without a folder mean nothing."""
    try:
        return bool(Path.cwd())
    except OSError:
        return False


def _interrupted(remark: str) -> NoReturn:
    if handler := signals.current():
        handler.reported = True
    _stop(f"interrupted: {remark}" if remark else "interrupted", code=INTERRUPTED)


def _stop(*lines: str, code: int) -> NoReturn:
    echo(*lines, err=True)
    raise typer.Exit(code) from None


class Stream(FileIO):
    """Standard output or error of a command. It may be closed early, since results are in files.

    Attributes:
        error: The first error of a write, reported at the end. All later output is dropped.
    """

    error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data) if self.error is None else len(data)
        except OSError as error:
            self.error = error
            return len(data)


@contextmanager
def streams() -> Iterator[Stream]:
    """Prints through `Stream` in the block, unless it is a console of Windows; yields standard output."""
    before, raw = (sys.stdout, sys.stderr), (Stream(1, "w", closefd=False), Stream(2, "w", closefd=False))
    sys.stdout, sys.stderr = (
        TextIOWrapper(
            BufferedWriter(new), getattr(old, "encoding", None), errors, line_buffering=new.isatty()
        )
        if os.name == "posix" or not new.isatty()
        else old
        for new, old, errors in zip(raw, before, ("replace", "backslashreplace"), strict=True)
    )
    try:
        yield raw[0]
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


STDOUT = Path("-")  # the file name that means standard output

PAGES = (".html", ".htm")  # suffixes of a report that is a page; any other report is JSON


def is_page(path: Path | None) -> bool:
    """True if the name of a report asks for a page."""
    return path is not None and path.suffix.lower() in PAGES


def write_document(content: Any, json: Path) -> None:
    """Write JSON to a file, or to the standard output."""
    from rewriter.ir.model import write_json

    if json != STDOUT:
        write_json(content, json)
        return
    typer.echo(dumps(content, indent=2, allow_nan=False))
