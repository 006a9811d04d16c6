"""The command line, a file for every command.

A command parses, calls one function of the API, and turns the outcome into an exit code.
"""

from __future__ import annotations

import gc
from typing import Annotated, Any

import typer
from typer.core import TyperGroup, TyperOption

from rewriter import __version__
from rewriter.cli import config, fix, passes, presets, scan

COMPLETION = {
    "install_completion": "Complete names on TAB in this shell",
    "show_completion": "Print what that would install",
}
"""Typer's own texts of these options take five lines of a screen."""


class _Root(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)
        for param in params:
            if isinstance(param, TyperOption) and param.name in COMPLETION:
                param.help = COMPLETION[param.name]
        return params


app = typer.Typer(
    name="rewriter",
    cls=_Root,
    help="Makes ONNX models safe for a TensorRT build in FP16, and proves it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
MODELS, LOOK_UP = "A model", "Look up"
"""Groups of commands in `rewriter --help`."""

app.command(rich_help_panel=MODELS, short_help="Make MODEL safe and fast in FP16, and check it")(fix.fix)
app.command(rich_help_panel=MODELS, short_help="Find what would go wrong; change nothing")(scan.scan)
app.command(rich_help_panel=LOOK_UP, short_help="Options in force, and where each comes from")(config.config)
app.add_typer(
    presets.app, name="presets", rich_help_panel=LOOK_UP, help="Pipelines by name; `presets show NAME`"
)
app.add_typer(
    passes.app, name="passes", rich_help_panel=LOOK_UP, help="What a pipeline can do; `passes show NAME`"
)

GARBAGE_THRESHOLD = 20_000
"""A graph of 20,000 nodes is some 10^5 Python objects that live on: looking for cycles among them after
every 700 new ones, as Python does, took a tenth of the time (18.3 s instead of 19.9 s)."""


def main() -> None:
    """Entry point of the console script."""
    gc.set_threshold(GARBAGE_THRESHOLD)
    app(prog_name="rewriter")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rewriter {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
