"""`rewriter scan`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rewriter.cli.exits import (
    BAD_INPUT,
    FAILED,
    STDOUT,
    is_page,
    print_error,
    reader_may_leave,
    show,
    write_document,
)
from rewriter.cli.parameters import (
    Json,
    Quiet,
    Report,
    Verbose,
    check_extra,
    configured,
    option,
    with_options,
)
from rewriter.ir.errors import InputsError, ModelError, RewriterError, UsageError
from rewriter.pipeline.options import OUTCOME, ScanCommand, ScanOptions

if TYPE_CHECKING:
    from rewriter.jobs.findings import ScanResult
    from rewriter.pipeline.config import ResolvedOptions

Models = Annotated[list[Path], typer.Argument(metavar="MODEL...", hidden=True)]
Sarif = Annotated[Path | None, option(OUTCOME, "FILE", "Write them as SARIF 2.1.0, too", "--sarif")]


@with_options(ScanCommand)
def scan(
    models: Models,
    json: Json = None,
    sarif: Sarif = None,
    written: Report = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
    **given: Any,
) -> None:
    """Find where MODEL goes wrong in FP16, and what would repair it; change nothing.

    Several models share one JSON and one SARIF file; their samples are net.npz beside net.onnx. Exits with
    0, with 1 if --fail-on says so, with 2 on bad usage or model.
    """
    from rewriter.jobs import scan as scanner
    from rewriter.report import scan as report
    from rewriter.report.progress import progress

    resolved = configured(models[0], given, quiet=quiet)
    for key, path in (("`json`", json), ("`sarif`", sarif), ("`report`", written)):
        check_extra(key, path, [*models, resolved.values["inputs"], resolved.file])
    verbosity = int(verbose) - int(quiet)
    if len(models) > 1:
        results, unread = _scan_all(models, resolved, written, quiet=quiet)
        show_all(results, unread, [json, written], sarif, verbosity)
    else:
        options = ScanOptions(**resolved.arguments("scan"))
        with resolved.errors_name_sources(), progress(shown=not quiet) as shown:
            results, unread = [scanner.scan(models[0], options, progress=shown)], []
        more = [] if sarif is None else [partial(write_sarif, results, unread, sarif)]
        show(results[0], report, json, written, more, verbosity=verbosity)
    least = resolved.values["fail_on"]
    if unread:
        raise typer.Exit(BAD_INPUT)
    if least is not None and any(result.reaches(least) for result in results):
        raise typer.Exit(FAILED)


def _scan_all(
    models: Sequence[Path], resolved: ResolvedOptions, written: Path | None, *, quiet: bool
) -> tuple[list[ScanResult], list[RewriterError]]:
    """The results, and the errors of models that cannot be scanned; those stop nothing."""
    from rewriter.hooks.precommit import data_beside
    from rewriter.jobs import scan as scanner
    from rewriter.report.progress import progress

    if written is not None and is_page(written):
        hint = "name it .json, or scan one model"
        raise UsageError("a page shows one model", where=f"`report` {written}", hint=hint)
    results, unread = [], list[RewriterError]()
    with resolved.errors_name_sources(), progress(shown=not quiet) as shown:
        for model in models:
            arguments = resolved.arguments("scan")
            beside = {} if {"inputs", "input_shapes"} & arguments.keys() else data_beside(model)
            try:
                results.append(scanner.scan(model, ScanOptions(**beside, **arguments), progress=shown))
            except (ModelError, InputsError) as error:
                unread.append(error)
    return results, unread


def show_all(
    results: Sequence[ScanResult],
    unread: Sequence[RewriterError],
    documents: Iterable[Path | None],
    sarif: Path | None,
    verbosity: int,
) -> None:
    """Print several results, and write them to the files that are named."""
    from rewriter.report import scan as report
    from rewriter.report.terminal import console

    named = [path for path in documents if path is not None]
    with reader_may_leave():
        for result in results:
            report.print_result(result, console(stderr=STDOUT in named), verbosity=verbosity)
    for error in unread:
        print_error(error)
    write_all(results, unread, named, sarif)


def write_all(
    results: Sequence[ScanResult],
    unread: Sequence[RewriterError],
    documents: Iterable[Path],
    sarif: Path | None,
) -> None:
    """Write several results as JSON and as SARIF."""
    from rewriter.report import scan as report

    for path in documents:
        write_document(report.all_as_dict(results, unread), path)
    if sarif is not None:
        write_sarif(results, unread, sarif)


def write_sarif(results: Sequence[ScanResult], unread: Sequence[RewriterError], path: Path) -> None:
    """Write results as one SARIF log."""
    from rewriter.ir.model import write_json
    from rewriter.report.sarif import as_sarif

    write_json(as_sarif(results, unread), path)
