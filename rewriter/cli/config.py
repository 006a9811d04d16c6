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
    model: Annotated[
        Path | None,
        typer.Argument(metavar="[MODEL]", help="A model, or a folder [the current one]", show_default=False),
    ] = None,
) -> None:
    """Show the options in force for MODEL, and where each comes from.

    Options of the command line come before all of them.
    """
    with exit_codes(), reader_may_leave():
        from rewriter.pipeline.config import load
        from rewriter.report.terminal import console

        configuration = load(model)
        console().print(_table(configuration, model or Path()))


def _table(configuration: Configuration, near: Path) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from rewriter.pipeline.config.config_file import shown
    from rewriter.pipeline.config.option_values import to_text
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
        else f"No file from {near.absolute()} upwards"
    )
    notes = [*resolved.ignored, *configuration.warnings]
    return Group(Text(head), "", table, *[Text(note) for note in (["", *notes] if notes else [])])
