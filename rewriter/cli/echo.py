"""Plain lines on the terminal: the one place of the command line that prints text of models and files."""

from __future__ import annotations

import typer

from rewriter.printable import printable


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Prints a text on stdout, or on stderr; control characters in it are spelled out."""
    typer.echo(printable(text), err=err, nl=nl)
