"""`rewriter scan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rewriter.base.errors import InputsError, ModelError, RewriterError, UsageError
from rewriter.cli.exits import BAD_INPUT, FAILED, is_page, print_error
from rewriter.cli.parameters import Outputs, configured, with_options
from rewriter.pipeline.options import ScanCommand, ScanOptions

if TYPE_CHECKING:
    from rewriter.base.errors import Severity
    from rewriter.jobs.scan import ScanResult
    from rewriter.pipeline.config import ResolvedOptions

Models = Annotated[list[Path], typer.Argument(metavar="MODEL...", hidden=True)]


@with_options(ScanCommand, outputs=("json", "sarif", "report", "verbose", "quiet"))
def scan(models: Models, outputs: Outputs, **given: Any) -> None:
    """Find where MODEL goes wrong in FP16, and the repair; change nothing.

    Several models share one JSON and one SARIF file; their samples are net.npz beside net.onnx. Exits with
    0, with 1 if --fail-on says so, with 2 on bad usage or model.
    """
    run_scan(models, given, outputs, several=len(models) > 1)


def run_scan(
    models: Sequence[Path],
    given: Mapping[str, Any],
    outputs: Outputs,
    *,
    several: bool = True,  # samples are beside the models, and one unread stops nothing
    least: Severity | None = None,  # that is a failure, if the user names none
) -> None:
    """Scan models, and write what was found.

    Raises:
        typer.Exit: with 1 after such a finding, with 2 if a model could not be read.
    """
    from rewriter.ir.model import write_json
    from rewriter.report import scan as report
    from rewriter.report.sarif import as_sarif

    resolved = configured(given, next(iter(models), None), quiet=outputs.quiet)
    outputs.check([*models, resolved.values["inputs"], resolved.configuration.file])
    if several and is_page(outputs.report):
        hint = "name it .json, or scan one model"
        raise UsageError("a page shows one model", option="report", where=str(outputs.report), hint=hint)
    results, unread = _scanned(models, resolved, quiet=outputs.quiet, several=several)
    more = [partial(write_json, as_sarif(results, unread), outputs.sarif)] if outputs.sarif else []
    if several:

        def each(results: Sequence[ScanResult], out: Any, verbosity: int) -> None:
            for result in results:
                report.print_result(result, out, verbosity=verbosity)

        as_dict = partial(report.all_as_dict, unread=unread)
        outputs.show(results, SimpleNamespace(print_result=each, as_dict=as_dict), more)
        for error in unread:
            print_error(error)
    else:
        outputs.show(results[0], report, more)
    least = resolved.values["fail_on"] or least
    if unread:
        raise typer.Exit(BAD_INPUT)
    if least is not None and any(result.reaches(least) for result in results):
        raise typer.Exit(FAILED)


def _scanned(
    models: Sequence[Path], resolved: ResolvedOptions, *, quiet: bool, several: bool
) -> tuple[list[ScanResult], list[RewriterError]]:
    """The results, and the errors of models that cannot be scanned; of several, those stop nothing."""
    from rewriter.hooks.fixing import data_beside
    from rewriter.jobs.scan import scan as job
    from rewriter.report.progress import progress

    results, unread, arguments = [], list[RewriterError](), resolved.arguments("scan")
    named = not several or {"inputs", "input_shapes"} & arguments.keys()
    with resolved.errors_name_sources(), progress(shown=not quiet) as shown:
        for model in models:
            options = ScanOptions(**({} if named else data_beside(model)), **arguments)
            try:
                results.append(job(model, options, progress=shown))
            except (ModelError, InputsError) as error:
                if not several:
                    raise
                unread.append(error)
    return results, unread
