"""Parses command lines of documents as the program would."""

import shlex
from typing import Any

import typer

from rewriter.cli import app


def parsed(line: str) -> None:
    """Go down to the command that is meant, and parse what stands behind it; nothing runs.

    Raises:
        Exception: no such command, option or value, or an argument that is missing.
    """
    command: Any = typer.main.get_command(app)
    words = shlex.split(line, comments=True)[1:]
    context = command.make_context("rewriter", list(words), resilient_parsing=False)
    while hasattr(command, "resolve_command"):
        rest = [*context._protected_args, *context.args]
        if not rest:
            return
        name, command, words = command.resolve_command(context, rest)
        context = command.make_context(name, list(words), parent=context)


def flat(text: str) -> str:
    """Without line breaks, wherever a terminal of some width put them."""
    return " ".join(text.split())
