"""`rewriter scan`, and `rewriter hook` for training repositories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rewriter.base.errors import InputsError, ModelError, RewriterError, UsageError
from rewriter.cli import Command, Group
from rewriter.cli.exits import BAD_INPUT, FAILED, echo, is_page, print_error, write_document
from rewriter.cli.parameters import Outputs, configured, with_options
from rewriter.ir.model.files import ENDINGS
from rewriter.pipeline.options import FixCommand, ScanCommand, ScanOptions

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
    from rewriter.report import scan as report
    from rewriter.report.sarif import as_sarif

    resolved = configured(given, next(iter(models), None), quiet=outputs.quiet)
    outputs.check([*models, resolved.values["inputs"], resolved.configuration.file])
    if several and is_page(outputs.report):
        hint = "name it .json, or scan one model"
        raise UsageError("a page shows one model", option="report", where=outputs.report, hint=hint)
    results, unread = _scanned(models, resolved, quiet=outputs.quiet, several=several)
    more = [partial(write_document, as_sarif(results, unread), outputs.sarif)] if outputs.sarif else []
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
    with resolved.errors_name_sources(), progress(shown=not quiet) as shown:
        for model in models:
            options = ScanOptions(**(data_beside(model, arguments) if several else {}), **arguments)
            try:
                results.append(job(model, options, progress=shown))
            except (ModelError, InputsError) as error:
                if not several:
                    raise
                unread.append(error)
    return results, unread


app = typer.Typer(cls=Group, help="Commands of the pre-commit hooks, for repositories with models.")

Committed = Annotated[
    list[Path], typer.Argument(metavar="MODEL...", show_default=False, help="Files, as pre-commit gives them")
]


class HookCommand(Command):
    """A command whose files follow its options: without `--`, where `args` of the user replace ours."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """A file called `--inputs=x.onnx` is a file."""
        if "--" not in args:
            files = [word for word in args if word.endswith(ENDINGS) and Path(word).is_file()]
            args = [*(word for word in args if word not in files), "--", *files]
        return super().parse_args(ctx, args)


@app.command("scan", cls=HookCommand)
@with_options(ScanCommand, "inputs", "precision", "target", "fail_on", outputs=("json", "sarif", "verbose"))
def hook_scan(models: Committed, outputs: Outputs, **given: Any) -> None:
    """Scan committed models. Samples come from net.npz beside net.onnx, if it exists.

    --json and --sarif write the findings of all models into one file each.

    Exits with 0, with 1 if a model has an error, with 2 if one cannot be read.
    """
    outputs.check(models)
    todo = [model for model in models if not _skipped(model)]
    run_scan(todo, given, outputs, least="error")


@app.command("fix", cls=HookCommand)
@with_options(FixCommand, "inputs", "preset", "target")
def hook_fix(models: Committed, **given: Any) -> None:
    """Fix committed models in place, once each, and keep net.raw.onnx. Samples as for `hook scan`.

    Exits with 0 if nothing was to be done, with 1 if a file changed, with 2 if one could not be fixed.
    """
    from rewriter.hooks.fixing import fix_committed, raw_path

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
    from rewriter.hooks.fixing import skipped

    if reason := skipped(model):
        echo(f"{model}: {reason}")
    return bool(reason)
