"""Commands whose help shows no value for a switch."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup, TyperOption

from rewriter.cli.parameters import FLAG

COMPLETION = {
    "install_completion": "Complete names on TAB in this shell",
    "show_completion": "Print what that would install",
}
"""Shorter than Typer's own texts, which need five lines."""


def _plain(params: list[Any]) -> list[Any]:
    """Options as they are shown: Typer would show `<bool>` after `--help`, which it makes itself."""
    for param in params:
        if not isinstance(param, TyperOption):
            continue
        if param.is_flag and param.metavar is None:
            param.metavar = FLAG
        if param.name in COMPLETION:
            param.help = COMPLETION[param.name]
            param.hidden = param.name == "show_completion"  # seldom needed: it still works
    return params


class Command(TyperCommand):
    """One command."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters of the command, `--help` among them."""
        return _plain(super().get_params(ctx))


class Group(TyperGroup):
    """A command with subcommands."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters of the group; a screen has no line for `--help` itself, and none for `--version`."""
        params = _plain(super().get_params(ctx))
        for param in params:
            if isinstance(param, TyperOption) and param.name in ("help", "version"):
                param.hidden = True
        return params
