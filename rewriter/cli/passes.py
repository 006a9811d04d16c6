"""`rewriter passes`."""

from __future__ import annotations

from typing import Annotated

import typer

from rewriter.cli.exits import exit_codes, reader_may_leave

app = typer.Typer(help="List the passes; `passes show NAME` explains one.")


@app.callback(invoke_without_command=True)
def _list_passes(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        with exit_codes(), reader_may_leave():
            from rewriter.catalogue import overview
            from rewriter.report.terminal import console

            console().print(overview())


@app.command("show")
def _show_pass(name: Annotated[str, typer.Argument(help="As `rewriter passes` lists it.")]) -> None:
    """Why a pass exists, its options, an example before and after, and what it declines."""
    with exit_codes(), reader_may_leave():
        from rewriter.catalogue import page
        from rewriter.pipeline import pass_named

        typer.echo(page(pass_named(name)).rstrip())
