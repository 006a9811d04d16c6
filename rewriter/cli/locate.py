"""`rewriter locate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rewriter.cli.exits import FAILED, is_page, show
from rewriter.cli.parameters import Json, Quiet, Report, Verbose, check_extra, with_options
from rewriter.pipeline.options import LocateCommand

Original = Annotated[Path, typer.Argument(metavar="ORIGINAL", help="The model as it was, taken in FP32")]
Other = Annotated[Path, typer.Argument(metavar="OTHER", help="The model that goes wrong")]


@with_options(LocateCommand)
def locate(
    original: Original,
    other: Other,
    written: Report = None,
    json: Json = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
    **given: Any,
) -> None:
    """Find the first tensor at which OTHER leaves ORIGINAL when an engine runs it.

    Exits with 0 if nothing is wrong, with 1 if something is, with 2 on bad usage or model.
    """
    from rewriter.jobs.locate import locate as job
    from rewriter.report import locate as report
    from rewriter.report.progress import progress

    for key, path in (("`json`", json), ("`report`", written)):
        check_extra(key, path, [original, other, given.get("inputs")])
    given["ranges"] = written is not None and is_page(written)
    with progress(shown=not quiet) as shown:
        found = job(original, other, **given, progress=shown)
    show(found, report, json, written, verbosity=int(verbose) - int(quiet))
    if found.wrong:
        raise typer.Exit(FAILED)
