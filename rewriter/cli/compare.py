"""`rewriter verify`, `locate` and `compare-inputs`: what differs between models or preprocessings."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rewriter.cli.exits import FAILED
from rewriter.cli.parameters import Outputs, configured, with_options
from rewriter.pipeline.options import CompareCommand, LocateOptions, VerifyOptions
from rewriter.pipeline.schema import declarations

if TYPE_CHECKING:
    from rewriter.pipeline.config import ResolvedOptions

Original = Annotated[Path, typer.Argument(metavar="ORIGINAL", hidden=True)]
Fixed = Annotated[Path, typer.Argument(metavar="FIXED", hidden=True)]
Before = Annotated[Path, typer.Argument(metavar="ORIGINAL", help="The original model, compared in FP32")]
After = Annotated[Path, typer.Argument(metavar="OTHER", help="The model that goes wrong")]
Ours = Annotated[Path, typer.Argument(metavar="OURS", help="npz, npy, folder, Polygraphy JSON")]
Theirs = Annotated[Path, typer.Argument(metavar="THEIRS", help="The same samples from the other pipeline")]


@with_options(VerifyOptions, outputs=("json", "report", "verbose", "quiet"))
def verify(original: Original, fixed: Fixed, outputs: Outputs, **given: Any) -> None:
    """Run FIXED and compare every output with ORIGINAL in FP32.

    Exits with 0 if it is within the tolerance, 1 if not, 2 on bad usage or model.
    """
    from rewriter.api import verify as job
    from rewriter.report import verify as report

    resolved = configured(given, original, quiet=outputs.quiet)
    outputs.check([original, fixed, resolved.values["inputs"], resolved.configuration.file])
    asked = resolved.arguments("verify") | _tolerance(resolved, given.get("metric"))
    named = resolved.errors_name_sources()
    result = outputs.run(named(partial(job, original, fixed, VerifyOptions(**asked))), report)
    if not result.passed:
        raise typer.Exit(FAILED)


def _tolerance(resolved: ResolvedOptions, metric: str | None) -> dict[str, Any]:
    """The tolerance and its source. A file's metric without a tolerance is meant for `fix`, and ignored."""
    from rewriter.runtime.metrics.tolerances import Tolerance

    usual, options = declarations(VerifyOptions)["metric"].default, resolved.arguments("verify")
    if "tolerance" not in options:
        return {"metric": metric or usual}
    source = resolved.where("tolerance")
    return {"tolerance": Tolerance(options["tolerance"], options.get("metric", usual), source)}


@with_options(LocateOptions, outputs=("report", "json", "verbose", "quiet"))
def locate(original: Before, other: After, outputs: Outputs, **given: Any) -> None:
    """Find the first tensor at which OTHER leaves ORIGINAL when an engine runs it.

    Exits with 0 if nothing is wrong, with 1 if something is, with 2 on bad usage or model.
    """
    from rewriter.jobs.locate import locate as job
    from rewriter.report import locate as report

    outputs.check([original, other, given.get("inputs")])
    if outputs.run(partial(job, original, other, **given), report).wrong:
        raise typer.Exit(FAILED)


@with_options(CompareCommand, outputs=("json", "verbose", "quiet"))
def compare_inputs(ours: Ours, theirs: Theirs, outputs: Outputs, **given: Any) -> None:
    """Find what differs between two preprocessing pipelines: layout, channel order, scale, resize ...

    Exits with 0 if they do the same, with 1 if they differ, with 2 on bad usage or data.
    """
    from rewriter.input_comparison.job import compare_inputs as job
    from rewriter.report import compare_inputs as report

    outputs.check([ours, theirs])
    if outputs.run(partial(job, ours, theirs, **given), report).differ:
        raise typer.Exit(FAILED)
