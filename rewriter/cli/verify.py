"""`rewriter verify`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rewriter.cli.exits import FAILED, is_page, show
from rewriter.cli.parameters import Json, Quiet, Report, Verbose, check_extra, configured, with_options
from rewriter.pipeline.options import VerifyOptions
from rewriter.pipeline.schema import declarations

if TYPE_CHECKING:
    from rewriter.pipeline.config import ResolvedOptions


@with_options(VerifyOptions)
def verify(
    original: Annotated[Path, typer.Argument(metavar="ORIGINAL", hidden=True)],
    fixed: Annotated[Path, typer.Argument(metavar="FIXED", hidden=True)],
    json: Json = None,
    written: Report = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
    **given: Any,
) -> None:
    """Run FIXED and compare every output with ORIGINAL in FP32.

    Exits with 0 if it is within the tolerance, 1 if not, 2 on bad usage or model.
    """
    from rewriter.jobs.verify import verify as job
    from rewriter.report import verify as report
    from rewriter.report.progress import progress

    resolved = configured(original, given, quiet=quiet)
    for key, path in (("`json`", json), ("`report`", written)):
        check_extra(key, path, [original, fixed, resolved.values["inputs"], resolved.file])
    asked = resolved.arguments("verify") | _tolerance(resolved, given.get("metric"))
    options = VerifyOptions(**asked, ranges=written is not None and is_page(written))
    with resolved.errors_name_sources(), progress(shown=not quiet) as shown:
        result = job(original, fixed, options, progress=shown)
    show(result, report, json, written, verbosity=int(verbose) - int(quiet))
    if not result.passed:
        raise typer.Exit(FAILED)


def _tolerance(resolved: ResolvedOptions, metric: str | None) -> dict[str, Any]:
    """The tolerance with the place that set it; a file's metric alone is a goal of `fix`, and ignored."""
    from rewriter.runtime.figures.tolerances import Tolerance

    usual = declarations(VerifyOptions)["metric"].default
    given = resolved.arguments("verify")
    if "tolerance" not in given:
        return {"metric": metric or usual}
    return {
        "tolerance": Tolerance(given["tolerance"], given.get("metric", usual), resolved.where("tolerance"))
    }
