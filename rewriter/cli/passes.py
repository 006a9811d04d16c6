"""`rewriter passes`."""

from __future__ import annotations

from typing import Annotated

import typer

from rewriter.cli.exits import exit_codes, reader_may_leave
from rewriter.cli.plain import Command, Group
from rewriter.pipeline import completion

app = typer.Typer(cls=Group)


@app.callback(invoke_without_command=True)
def _list_passes(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        with exit_codes(), reader_may_leave():
            from rewriter.pipeline.catalogue.passes import overview
            from rewriter.report.terminal import console

            console().print(overview())


@app.command("show", cls=Command)
def _show_pass(
    name: Annotated[
        str, typer.Argument(help="As `rewriter passes` lists it.", autocompletion=completion.passes)
    ],
) -> None:
    """Show why a pass exists, its options, an example before and after, and what it declines."""
    with exit_codes(), reader_may_leave():
        from rewriter.pipeline.catalogue.passes import page
        from rewriter.pipeline.registry import find

        typer.echo(page(find(name, "passes show")).rstrip())
