"""`rewriter config`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rewriter.cli.exits import exit_codes, reader_may_leave

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
) -> None:
    """Show the options in force in a folder, and where each comes from.

    Options of the command line come before all of them. Where a model lies does not matter.
    """
    with exit_codes(), reader_may_leave():
        from rewriter.pipeline.config import load
        from rewriter.report.terminal import console

        configuration = load(folder)
        console().print(_table(configuration, folder or Path()))


def _table(configuration: Configuration, folder: Path) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from rewriter.pipeline.config.files import shown
    from rewriter.pipeline.config.values import to_text
    from rewriter.pipeline.options import KEYS

    resolved = configuration.resolve()
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    table.add_column("option", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("from", overflow="fold")
    for name, key in KEYS.items():
        origin = resolved.origins[name]
        value = to_text(resolved.values[name])
        table.add_row(key.key, value, origin.text, style="bold" if origin.source else None)
    head = (
        f"File: {shown(configuration.file)}"
        if configuration.file
        else f"No file from {folder.absolute()} up to the project's root"
    )
    notes = [*resolved.ignored, *configuration.warnings]
    return Group(Text(head), "", table, *[Text(note) for note in (["", *notes] if notes else [])])
