"""`rewriter help`."""

from __future__ import annotations

from typing import Annotated

import typer


def show_help(
    context: typer.Context,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[COMMAND]", help="Such as `fix`", show_default=False)
    ] = None,
) -> None:
    """Show the options of a command, as its --help does."""
    context.find_root().command.main([*(words or ()), "--help"], prog_name="rewriter")
