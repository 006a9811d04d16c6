"""Commands whose help says of a switch that it takes nothing."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup, TyperOption

from rewriter.cli.parameters import FLAG

COMPLETION = {
    "install_completion": "Complete names on TAB in this shell",
    "show_completion": "Print what that would install",
}
"""Typer's own texts of these options take five lines of a screen."""


def _plain(params: list[Any]) -> list[Any]:
    """Options as they shall be shown: `--help`, which Typer makes itself, would take a `<bool>`."""
    for param in params:
        if not isinstance(param, TyperOption):
            continue
        if param.is_flag and param.metavar is None:
            param.metavar = FLAG
        if param.name in COMPLETION:
            param.help = COMPLETION[param.name]
            param.hidden = param.name == "show_completion"  # for those who know that it is there
    return params


class Command(TyperCommand):
    """One command."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Of the command, `--help` among them."""
        return _plain(super().get_params(ctx))


class Group(TyperGroup):
    """A command with commands of its own."""

    def get_params(self, ctx: Any) -> list[Any]:
        """As for a command, completion among them."""
        return _plain(super().get_params(ctx))
