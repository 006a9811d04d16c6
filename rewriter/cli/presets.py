"""`rewriter presets`."""

from __future__ import annotations

from typing import Annotated

import typer

from rewriter.cli.exits import exit_codes, reader_may_leave
from rewriter.cli.plain import Command, Group
from rewriter.pipeline import completion

app = typer.Typer(cls=Group)


@app.callback(invoke_without_command=True)
def _list_presets(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        with exit_codes(), reader_may_leave():
            from rewriter.pipeline.catalogue import presets
            from rewriter.report.terminal import console

            console().print(presets.overview())


@app.command("show", cls=Command)
def _show_preset(
    name: Annotated[
        str, typer.Argument(help="As `rewriter presets` lists it.", autocompletion=completion.presets)
    ],
) -> None:
    """Show the pipeline of a preset, its defaults, and when to use it."""
    with exit_codes(), reader_may_leave():
        from rewriter.pipeline.catalogue.presets import page
        from rewriter.pipeline.presets import preset_named
        from rewriter.report.terminal import console

        console().print(page(preset_named(name)))
