"""`rewriter scan`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rewriter.cli.exits import FAILED, reader_may_leave
from rewriter.cli.parameters import FLAG, ModelPath, Verbose, check_extra, configured, option, with_options
from rewriter.pipeline.options import OUTCOME, ScanCommand, ScanOptions

if TYPE_CHECKING:
    from rewriter.jobs.findings import ScanResult


@with_options(ScanCommand)
def scan(
    model: ModelPath,
    json: Annotated[Path | None, option(OUTCOME, "FILE", "Write the findings as JSON, too")] = None,
    sarif: Annotated[Path | None, option(OUTCOME, "FILE", "Write them as SARIF 2.1.0, too")] = None,
    verbose: Verbose = False,
    quiet: Annotated[bool, option(OUTCOME, FLAG, "Print the counts alone", "-q", "--quiet")] = False,
    **given: Any,
) -> None:
    """Find where MODEL goes wrong in FP16, and what would repair it; change nothing.

    Exits with 0, with 1 if --fail-on says so, with 2 on bad usage or model.
    """
    from rewriter.jobs import scan as scanner
    from rewriter.report.progress import progress

    resolved = configured(model, given, quiet=quiet)
    for flag, path in (("--json", json), ("--sarif", sarif)):
        check_extra(flag, path, [model, resolved.values["inputs"]])
    options = ScanOptions(**resolved.arguments("scan"))
    with resolved.errors_name_sources(), progress(shown=not quiet) as shown:
        result = scanner.scan(model, options, progress=shown)
    _show_findings(result, json, sarif, verbosity=int(verbose) - int(quiet))
    least = resolved.values["fail_on"]
    if least is not None and result.reaches(least):
        raise typer.Exit(FAILED)


def _show_findings(result: ScanResult, json: Path | None, sarif: Path | None, *, verbosity: int) -> None:
    from rewriter.model import write_json
    from rewriter.report import sarif as sarif_report
    from rewriter.report import scan as scan_report
    from rewriter.report import terminal

    if json is not None:
        write_json(scan_report.as_dict(result), json)
    if sarif is not None:
        write_json(sarif_report.as_sarif(result), sarif)
    with reader_may_leave():
        scan_report.print_result(result, terminal.console(), verbosity=verbosity)
