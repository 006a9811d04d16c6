"""`rewriter hook`: for training repositories."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rewriter.cli import Command, Group
from rewriter.cli.exits import BAD_INPUT, FAILED, echo, print_error
from rewriter.cli.parameters import Outputs, with_options
from rewriter.cli.scan import run_scan
from rewriter.ir.errors import RewriterError
from rewriter.pipeline.options import FixCommand, ScanCommand

app = typer.Typer(cls=Group, help="What the pre-commit hooks run, for repositories with models.")

Models = Annotated[
    list[Path], typer.Argument(metavar="MODEL...", show_default=False, help="Files, as pre-commit gives them")
]


@app.command(cls=Command)
@with_options(ScanCommand, "inputs", "precision", "target", "fail_on", outputs=("json", "sarif", "verbose"))
def scan(models: Models, outputs: Outputs, **given: Any) -> None:
    """Scan committed models. Samples are taken from net.npz beside net.onnx, if it is there.

    --json and --sarif write the findings of all models into one file each.

    Exits with 0, with 1 if a model has an error, with 2 if one cannot be read.
    """
    outputs.check(models)
    todo = [model for model in models if not _skipped(model)]
    run_scan(todo, given, outputs, least="error")


@app.command(cls=Command)
@with_options(FixCommand, "inputs", "preset", "target")
def fix(models: Models, **given: Any) -> None:
    """Fix committed models in their place, once each, and keep net.raw.onnx. Samples as for `hook scan`.

    Exits with 0 if nothing was to be done, with 1 if a file changed, with 2 if one could not be fixed.
    """
    from rewriter.hooks.fixing import raw_path
    from rewriter.hooks.precommit import fix_committed

    codes = [0]
    for model in models:
        try:
            if _skipped(model):
                continue
            if fix_committed(model, given):
                codes.append(FAILED)
                echo(f"{model}: fixed; review it, and add it; the original is {raw_path(model).name}")
            else:
                echo(f"{model}: nothing to do")
        except RewriterError as error:
            codes.append(BAD_INPUT)
            print_error(error)
    if max(codes):
        raise typer.Exit(max(codes))


def _skipped(model: Path) -> bool:
    """True if the model is to be skipped, which is printed."""
    from rewriter.hooks.precommit import skipped

    if reason := skipped(model):
        echo(f"{model}: {reason}")
    return bool(reason)
