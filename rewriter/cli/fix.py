"""`rewriter fix`."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from rewriter.base.errors import UsageError
from rewriter.base.text import command_line
from rewriter.cli.exits import FAILED, UNBUILDABLE, is_page
from rewriter.cli.parameters import Outputs, check_extra, check_outputs, configured, with_options
from rewriter.pipeline.options import FixCommand, FixOptions
from rewriter.pipeline.schema import declarations

Output = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="OUT", help="The result [MODEL.fixed.onnx]")
]
Models = Annotated[list[Path], typer.Argument(metavar="MODEL", hidden=True)]
DEFAULTS = declarations(FixCommand)


@with_options(FixCommand, outputs=("json", "verbose", "quiet"))
def fix(models: Models, outputs: Outputs, output: Output = None, **given: Any) -> None:
    """Rewrite MODEL so that TensorRT builds it in FP16 and it stays accurate.

    Exits with 0 if it is verified, 1 if a check failed, 2 on bad usage or model, 3 if TensorRT cannot build
    the original MODEL. A folder that `rewriter record` wrote stands for all models in it.
    """
    from rewriter import api
    from rewriter.ir.model import data_files
    from rewriter.jobs.fix.provenance import is_result_of
    from rewriter.report import fix as report
    from rewriter.runtime.recording.record import RECORD

    model, *others = models
    if not others and (model / RECORD).is_file():
        _recording(model, output, outputs, given)
        return
    if others or model.is_dir():
        hint = f"rewriter batch {command_line(models)} -o FOLDER fixes them all"
        raise UsageError("it takes one model", where="rewriter fix", hint=hint)
    if given.pop("loop_seconds", None) is not None:
        hint = "name the folder that `rewriter record` wrote"
        raise UsageError("it is for a recording", option="loop-seconds", hint=hint)
    in_place = given.get("in_place", False)
    if output is None and not (in_place or given.get("dry_run")):
        output = model.with_suffix(".fixed.onnx")
        if output.exists() and not is_result_of(output, model):
            hint = "name the result with -o, or say `in-place` or `dry-run`"
            raise UsageError(
                "it exists, and is not replaced unless you name it", where=str(output), hint=hint
            )
    resolved = configured(given, model, quiet=outputs.quiet)
    values, save_plan = resolved.values, given.get("save_plan")
    read = [model, *data_files(model), values["plan"], values["inputs"], resolved.configuration.file]
    read.extend(values["plugin_lib"] or [])
    written = values["report"]
    outputs = replace(outputs, report=written)
    check_outputs(read[1:], output=output)  # MODEL itself is a matter of --in-place
    resolved.errors_name_sources()(check_extra)("report", written, [*read, output])
    check_outputs([*read, output, written], save_plan=save_plan, json=outputs.json)
    options = FixOptions(**resolved.arguments("fix"), page=written is not None and is_page(written))
    job = partial(api.fix, model, output or (model if in_place else None), options)
    result = outputs.run(resolved.errors_name_sources()(job), report)
    if result.conclusion.kind == "unbuildable":
        raise typer.Exit(UNBUILDABLE)
    failed = result.verdict is not None and not result.verdict.passed
    if failed or (options.strict and options.verify and not result.accepted):
        raise typer.Exit(FAILED)


def _recording(folder: Path, output: Path | None, outputs: Outputs, given: dict[str, Any]) -> None:
    """Fixes the files of a recording as a batch, each on its own samples."""
    from rewriter.cli.batch import fix_all

    if output is None:
        raise UsageError("it has several models", where=str(folder), hint="name a folder with -o")
    for name in ("in_place", "dry_run", "save_plan", "inputs", "image_preprocess"):
        if given.pop(name, None):
            raise UsageError("it is for one model", option=name.replace("_", "-"), hint="name one file")
    if given.get("report") is not None:
        given["report"] = [given["report"]]
    seconds = given.pop("loop_seconds", DEFAULTS["loop_seconds"].default) * given.get("verify", True)
    fix_all([folder], output, given, json=outputs.json, quiet=outputs.quiet, recording=folder, loop_s=seconds)
