"""`rewriter config`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from rewriter.cli.exits import STDOUT, write_document
from rewriter.cli.parameters import FLAG, Json, check_outputs, option
from rewriter.pipeline.options import KEYS, OUTCOME


def config(
    json: Json = None,
    quiet: Annotated[bool, option(OUTCOME, FLAG, "Only what some source sets", "-q", "--quiet")] = False,
) -> None:
    """Show the options in force in this folder, and where each comes from.

    Options of the command line come before all of them. Where a model lies does not matter.
    """
    from rewriter.pipeline.config import load, shown
    from rewriter.pipeline.reader import to_text
    from rewriter.report.json import document
    from rewriter.report.tables import Cell, Table
    from rewriter.report.terminal import console, printed

    check_outputs([], json=json)
    resolved = load().resolve()
    file, sources = resolved.configuration.file, resolved.sources
    notes = [*resolved.ignored, *resolved.configuration.warnings]
    if json is not None:
        options = {
            key.key: {"value": resolved.values[n], "from": sources[n].named(n)} for n, key in KEYS.items()
        }
        report = {"file": str(file) if file else None, "options": options, "warnings": notes}
        write_document(document(report), json)
    if json == STDOUT:
        return
    rows = []
    for name, key in KEYS.items():
        own = sources[name].is_users
        if own or not quiet:
            cells = key.key, to_text(resolved.values[name]), sources[name].named(name)
            rows.append([Cell(cell, state="good" if own else "plain") for cell in cells])
    out = console()
    nothing = f"No file from {Path.cwd()} up to the project's root"
    table = printed(Table({"option": "choice", "value": "text", "from": "text"}, rows))
    out.print(
        f"File: {shown(file)}" if file else nothing, "", table, *(["", *notes] if notes else []), sep="\n"
    )
