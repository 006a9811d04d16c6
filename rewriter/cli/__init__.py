"""The command line, a file for every command.

A command parses, calls one function of the API, and turns the outcome into an exit code. Its file is imported
when it is run: a shell that completes a word does not wait for the others.
"""

from __future__ import annotations

import gc
from signal import SIGINT
from typing import Annotated

import typer

from rewriter import __version__
from rewriter.cli.commands import Root
from rewriter.cli.exits import INTERRUPTED, echo
from rewriter.report.signals import listening

app = typer.Typer(
    name="rewriter",
    cls=Root,
    help="Makes ONNX models safe for TensorRT in FP16.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

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
