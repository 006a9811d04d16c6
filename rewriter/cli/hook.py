"""`rewriter hook`: for training repositories."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rewriter.cli import Command, Group
from rewriter.cli.exits import BAD_INPUT, FAILED, echo, reader_may_leave
from rewriter.cli.parameters import FLAG, Json, Verbose, check_outputs, with_options
from rewriter.cli.scan import Sarif, write_all
from rewriter.pipeline.options import FixCommand, ScanCommand

if TYPE_CHECKING:
    from rewriter.hooks.precommit import FileOutcome

app = typer.Typer(cls=Group, help="What the pre-commit hooks run, for repositories with models.")

Models = Annotated[
    list[Path], typer.Argument(metavar="MODEL...", show_default=False, help="Files, as pre-commit gives them")
]


@app.command(cls=Command)
@with_options(ScanCommand, "inputs", "precision", "target", "fail_on")
def scan(
    models: Models, json: Json = None, sarif: Sarif = None, verbose: Verbose = False, **given: Any
) -> None:
    """Scan committed models. Samples are taken from net.npz beside net.onnx, if it is there.

    --json and --sarif write the findings of all models into one file each.

    Exits with 0, with 1 if a model has an error, with 2 if one cannot be read.
    """
    from rewriter.hooks.precommit import process

    check_outputs(models, json=json, sarif=sarif)
    done = _run((process(model, "scan", **given) for model in models), verbose=verbose)
    results = [outcome.detail for outcome in done if outcome.detail is not None]  # none of skipped files
    unread = [outcome.error for outcome in done if outcome.error is not None]
    write_all(results, unread, [json], sarif)
    _end(done)


@app.command(cls=Command)
@with_options(FixCommand, "inputs", "preset", "target")
def fix(
    models: Models,
    build: Annotated[bool, typer.Option("--build", metavar=FLAG, help="Build with TensorRT, too")] = False,
    verbose: Verbose = False,
    **given: Any,
) -> None:
    """Fix committed models in their place, once each. Samples as for `hook scan`.

    Exits with 0 if nothing was to be done, with 1 if a file changed, with 2 if one could not be fixed.
    """
    from rewriter.hooks.precommit import process

    _end(_run((process(model, "fix", **given, build=build or None) for model in models), verbose=verbose))


def _run(outcomes: Iterable[FileOutcome], *, verbose: bool) -> list[FileOutcome]:
    """The outcomes, each printed when it is there."""
    done = []
    with reader_may_leave():
        for outcome in outcomes:
            _show(outcome, verbose=verbose)
            done.append(outcome)
    return done


def _end(done: Iterable[FileOutcome]) -> None:
    if any(outcome.error is not None for outcome in done):
        raise typer.Exit(BAD_INPUT)
    if not all(outcome.passed for outcome in done):
        raise typer.Exit(FAILED)


def _show(outcome: FileOutcome, *, verbose: bool) -> None:
    """The line of a file; all findings of one that does not pass."""
    from rewriter.jobs.findings import ScanResult
    from rewriter.report import scan as scan_report
    from rewriter.report import terminal

    if isinstance(outcome.detail, ScanResult) and (verbose or not outcome.passed):
        scan_report.print_result(outcome.detail, terminal.console(), verbosity=int(verbose))
    else:
        echo(outcome.text)
