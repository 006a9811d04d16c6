"""The command line, a file for every command.

A command parses, calls one function of the API, and turns the outcome into an exit code.
"""

from __future__ import annotations

import gc
from typing import Annotated

import typer

from rewriter import __version__
from rewriter.cli import compare_inputs, fix, locate, passes, probe, scan, verify

app = typer.Typer(
    name="rewriter",
    help="Makes ONNX models safe for a TensorRT build in FP16, and proves it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(fix.fix)
app.command()(scan.scan)
app.command()(verify.verify)
app.command(short_help="Find the first tensor at which an engine goes wrong")(locate.locate)
app.command(short_help="Ask what this TensorRT does on this GPU")(probe.probe)
app.command("compare-inputs", short_help="Find what differs between two preprocessings")(
    compare_inputs.compare_inputs
)
app.add_typer(passes.app, name="passes")

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
