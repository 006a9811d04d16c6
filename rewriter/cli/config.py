"""`rewriter config`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rewriter.cli.exits import STDOUT, exit_codes, reader_may_leave, write_document
from rewriter.cli.parameters import FLAG, Json, check_outputs, option
from rewriter.pipeline.options import OUTCOME

if TYPE_CHECKING:
    from rich.console import RenderableType

    from rewriter.pipeline.config import Configuration


def config(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FOLDER]",
            help="The folder to work in [the current one]",
            show_default=False,
            exists=True,
            file_okay=False,
        ),
    ] = None,
    json: Json = None,
    quiet: Annotated[bool, option(OUTCOME, FLAG, "Only what some source sets", "-q", "--quiet")] = False,
) -> None:
    """Show the options in force in a folder, and where each comes from.

    Options of the command line come before all of them. Where a model lies does not matter.
    """
    with exit_codes(), reader_may_leave():
        from rewriter.pipeline.config import load
        from rewriter.report.terminal import console

        check_outputs([], json=json)
        configuration = load(folder)
        if json is not None:
            write_document(_as_dict(configuration), json)
        if json != STDOUT:
            console().print(_table(configuration, folder or Path(), everything=not quiet))


def _as_dict(configuration: Configuration) -> dict[str, Any]:
    from rewriter.pipeline.options import KEYS
    from rewriter.report.json import document

    resolved = configuration.resolve()
    options = {
        key.key: {"value": resolved.values[name], "from": resolved.sources[name].named(name)}
        for name, key in KEYS.items()
    }
    file = str(configuration.file) if configuration.file else None
    warnings = [*resolved.ignored, *configuration.warnings]
    return document({"file": file, "options": options, "warnings": warnings})


def _table(configuration: Configuration, folder: Path, *, everything: bool) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from rewriter.pipeline.config_file import shown
    from rewriter.pipeline.options import KEYS
    from rewriter.pipeline.reader import to_text
    from rewriter.report.terminal import new_table

    resolved = configuration.resolve()
    table = new_table("", "option", "value", "from", whole="option")
    for name, key in KEYS.items():
        source = resolved.sources[name]
        if everything or source.is_users:
            style = "bold" if source.is_users else None
            table.add_row(key.key, to_text(resolved.values[name]), source.named(name), style=style)
    head = f"No file from {folder.absolute()} up to the project's root"
    if configuration.file:
        head = f"File: {shown(configuration.file)}"
    notes = [*resolved.ignored, *configuration.warnings]
    return Group(Text(head), "", table, *[Text(note) for note in (["", *notes] if notes else [])])
