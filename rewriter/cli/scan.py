"""`rewriter scan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rewriter.cli.exits import FAILED, show
from rewriter.cli.parameters import (
    Json,
    ModelPath,
    Quiet,
    Report,
    Verbose,
    check_extra,
    configured,
    option,
    with_options,
)
from rewriter.pipeline.options import OUTCOME, ScanCommand, ScanOptions


@with_options(ScanCommand)
def scan(
    model: ModelPath,
    json: Json = None,
    sarif: Annotated[Path | None, option(OUTCOME, "FILE", "Write them as SARIF 2.1.0, too")] = None,
    written: Report = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
    **given: Any,
) -> None:
    """Find where MODEL goes wrong in FP16, and what would repair it; change nothing.

    Exits with 0, with 1 if --fail-on says so, with 2 on bad usage or model.
    """
    from rewriter.jobs import scan as scanner
    from rewriter.model import write_json
    from rewriter.report import sarif as sarif_report
    from rewriter.report import scan as report
    from rewriter.report.progress import progress

    resolved = configured(model, given, quiet=quiet)
    for flag, path in (("--json", json), ("--sarif", sarif), ("--report", written)):
        check_extra(flag, path, [model, resolved.values["inputs"], resolved.file])
    options = ScanOptions(**resolved.arguments("scan"))
    with resolved.errors_name_sources(), progress(shown=not quiet) as shown:
        result = scanner.scan(model, options, progress=shown)
    more = [] if sarif is None else [lambda: write_json(sarif_report.as_sarif(result), sarif)]
    show(result, report, json, written, more, verbosity=int(verbose) - int(quiet))
    least = resolved.values["fail_on"]
    if least is not None and result.reaches(least):
        raise typer.Exit(FAILED)
