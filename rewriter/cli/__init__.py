"""The command line, a file for every command.

A command parses, calls one function of the API, and turns the outcome into an exit code.
"""

from __future__ import annotations

import gc
from functools import partial
from signal import SIGINT
from typing import Annotated

import typer

from rewriter import __version__
from rewriter.cli import (
    batch,
    catalogue,
    compare_inputs,
    config,
    fix,
    hook,
    locate,
    probe,
    scan,
    verify,
)
from rewriter.cli.echo import echo
from rewriter.cli.exits import INTERRUPTED
from rewriter.cli.help import show_help
from rewriter.cli.plain import Command, Group
from rewriter.report.signals import listening

app = typer.Typer(
    name="rewriter",
    cls=Group,
    help="Makes ONNX models safe for TensorRT in FP16.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
MODELS, AROUND = "A model", "Around it"
"""Groups of commands in `rewriter --help`."""

_of_models = partial(app.command, cls=Command, rich_help_panel=MODELS)
_around = partial(app.command, cls=Command, rich_help_panel=AROUND)

_of_models(short_help="Make MODEL safe and fast in FP16, and check it")(fix.fix)
_of_models(short_help="Find what would go wrong; change nothing")(scan.scan)
_of_models(short_help="Compare every output of two versions")(verify.verify)
_of_models(short_help="Find the first tensor that goes wrong")(locate.locate)
_of_models("compare-inputs", short_help="Find how two preprocessings differ")(compare_inputs.compare_inputs)
_of_models(short_help="Fix many models, here or on a cluster")(batch.batch)
_around(short_help="What this TensorRT does on this GPU")(probe.probe)
_around(short_help="Options in force, and where each comes from")(config.config)
_around("help", hidden=True)(show_help)
app.add_typer(
    catalogue.presets, name="presets", rich_help_panel=AROUND, help="Pipelines by name; `presets show NAME`"
)
app.add_typer(
    catalogue.passes, name="passes", rich_help_panel=AROUND, help="What a pipeline can do; `passes show NAME`"
)
app.add_typer(hook.app, name="hook", rich_help_panel=AROUND, help="Hooks of pre-commit: `hook install`")

GARBAGE_THRESHOLD = 20_000
"""Objects made between two searches for cycles; Python's own 700 cost a graph of 20,000 nodes 8 % of the time
(19.9 s instead of 18.3 s), since its 10^5 objects all live on."""


def main() -> None:
    """Runs the command that `sys.argv` names, and exits."""
    gc.set_threshold(GARBAGE_THRESHOLD)
    with listening() as signals:
        try:
            app(prog_name="rewriter")
        except SystemExit as end:
            if signals.received == SIGINT and not signals.reported:  # Typer ends in silence outside a command
                echo("interrupted", err=True)
            raise SystemExit(128 + signals.received if signals.received else end.code) from None
        except KeyboardInterrupt:  # while Typer makes the commands
            echo("interrupted", err=True)
            raise SystemExit(INTERRUPTED) from None


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
