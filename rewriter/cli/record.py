"""`rewriter record`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rewriter.base.text import command_line, count
from rewriter.cli.exits import echo
from rewriter.cli.parameters import Quiet, option
from rewriter.pipeline.options import DATA

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Takes the samples")]
Command = Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="python my_script.py ...")]
Calls = Annotated[int, option(DATA, "N", "End the script after N calls [0: at its end]", "--calls", min=0)]
Disk = Annotated[float, option(DATA, "GIB", "Most that samples take on disk [4]", "--disk", min=0)]


def record(
    folder: Folder, command: Command, calls: Calls = 0, disk: Disk = 4.0, quiet: Quiet = False
) -> None:
    """Run a script that calls ONNX Runtime, and keep what its models are called with.

    What it prints and its exit code pass through. `rewriter fix FOLDER -o fixed/` fixes its models.
    """
    from rewriter.jobs.record import record_script

    recording = record_script(folder, command, calls=calls, disk_gib=disk)
    if not recording.calls:
        raise typer.Exit(recording.exit_code)
    for note in recording.notes:
        echo(f"warning: {note}", err=True)
    for state in () if quiet else recording.states:
        moves = "grows" if state.step is None else f"moves by {state.step:.2g} of FP16's last places a call"
        echo(f"{state.file}: {state.output} becomes {state.input}, and {moves}", err=True)
    if not quiet:
        parts = (len(recording.files), "file"), (len(recording.calls), "call"), (len(recording.links), "link")
        echo(f"{folder}: {', '.join(count(*part) for part in parts)}", err=True)
        echo(f"next: {command_line(['rewriter', 'fix', folder, '-o', 'fixed'])}", err=True)
    raise typer.Exit(recording.exit_code)
