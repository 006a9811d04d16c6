"""Moves a result into its place: its data first, the model last."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rewriter.batch.entry import Entry, Outcome
from rewriter.batch.record import state_file
from rewriter.errors import OutputError

PREFIX = ".rewriter-batch-"


@contextmanager
def workspace(entry: Entry) -> Iterator[Path]:
    """A folder beside the output, on the same disk; it is removed at the end."""
    make_folder(entry.output.parent)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=entry.output.parent) as name:
        for part in ("result", "scratch"):
            (Path(name) / part).mkdir()
        yield Path(name)


def make_folder(folder: Path) -> None:
    """Makes a folder for results.

    Raises:
        OutputError: that is not possible.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        hint = "name another folder with -o"
        raise OutputError(
            f"cannot make the folder: {error.strerror}", where=str(folder), hint=hint
        ) from error


def land(entry: Entry, outcome: Outcome, result: Path) -> Outcome:
    """Moves what is in the folder `result` to the output's folder; the outcome names the files.

    The state of an earlier run goes first: a kill in between leaves a model that the next run makes anew.

    Raises:
        OutputError: a file cannot be moved.
    """
    try:
        state_file(entry.output).unlink(missing_ok=True)
        files = sorted((file for file in result.iterdir()), key=lambda file: file.name == entry.output.name)
        for file in files:
            file.replace(entry.output.with_name(file.name))
    except OSError as error:
        hint = "check the folder, its permissions and the free space"
        where = str(entry.output)
        raise OutputError(f"cannot write the model: {error.strerror}", where=where, hint=hint) from error
    return replace(outcome, files=tuple(file.name for file in files))
