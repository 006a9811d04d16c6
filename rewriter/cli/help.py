"""`rewriter help`."""

from __future__ import annotations

from typing import Annotated

import typer

from rewriter.cli.echo import echo
from rewriter.cli.exits import exit_codes, reader_may_leave


def help_pages(
    topic: Annotated[
        str | None,
        typer.Argument(
            metavar="[PAGE]",
            help="As `rewriter help` lists it, or docs/plans.md#searching",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show a page of the documentation, or list all of them."""
    with exit_codes(), reader_may_leave():
        from rewriter.cli import handbook
        from rewriter.report.terminal import console

        if topic is None:
            known = handbook.pages()
            width = max(map(len, known))
            echo("\n".join(f"{name:{width}}  {handbook.title(path)}" for name, path in known.items()))
            return
        text = handbook.text_of(topic)
        screen = console()
        if screen.is_terminal:
            from rich.markdown import Markdown

            screen.print(Markdown(text))
        else:
            echo(text, nl=False)
