"""`rewriter fix`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from rewriter.cli.exits import FAILED, UNBUILDABLE, is_page, show
from rewriter.cli.parameters import (
    Json,
    Quiet,
    Verbose,
    check_extra,
    check_outputs,
    configured,
    with_options,
)
from rewriter.ir.errors import UsageError
from rewriter.pipeline.options import FixCommand, FixOptions

Output = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="OUT", help="The result [MODEL.fixed.onnx]")
]
Models = Annotated[list[Path], typer.Argument(metavar="MODEL", hidden=True)]


@with_options(FixCommand)
def fix(
    models: Models,
    output: Output = None,
    json: Json = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
    **given: Any,
) -> None:
    """Rewrite MODEL so that TensorRT builds it in FP16 and it stays accurate.

    Exits with 0 if it is verified, 1 if a check failed, 2 on bad usage or model, 3 if TensorRT does not build
    MODEL as it came.
    """
    from rewriter.ir.model import data_files
    from rewriter.jobs.fix import api
    from rewriter.report import fix as report
    from rewriter.report.progress import progress

    model, *others = models
    if others:
        hint = f"rewriter batch {shlex.join(map(str, models))} -o FOLDER fixes them all"
        raise UsageError("it takes one model", where="rewriter fix", hint=hint)
    in_place = given.get("in_place", False)
    if output is None and not (in_place or given.get("dry_run")):
        output = _beside(model)
    resolved = configured(given, model, quiet=quiet)
    values, save_plan = resolved.values, given.get("save_plan")
    read = [model, *data_files(model), values["plan"], values["inputs"], resolved.configuration.file]
    read.extend(values["plugin_lib"] or [])
    written = values["report"]
    check_outputs(read[1:], output=output)  # MODEL itself is a matter of --in-place
    check_outputs([*read, output], save_plan=save_plan)
    check_extra(resolved.where("report"), written, [*read, output, save_plan])
    check_outputs([*read, output, save_plan, written], json=json)
    options = FixOptions(**resolved.arguments("fix"), page=written is not None and is_page(written))
    with resolved.errors_name_sources(), progress(shown=not quiet) as shown:
        result = api.fix(model, output or (model if in_place else None), options, progress=shown)
    show(result, report, json, written, verbosity=int(verbose) - int(quiet))
    if result.conclusion.kind == "unbuildable":
        raise typer.Exit(UNBUILDABLE)
    failed = result.verdict is not None and not result.verdict.passed
    if failed or (options.strict and options.verify and not result.proven):
        raise typer.Exit(FAILED)


def _beside(model: Path) -> Path:
    """The output where none is named: `net.fixed.onnx` beside `net.onnx`."""
    output = model.with_suffix(".fixed.onnx")
    if output.exists():
        hint = "name the result with -o, or say `in-place` or `dry-run`"
        raise UsageError("it exists, and is not replaced unless you name it", where=str(output), hint=hint)
    return output
