"""`rewriter fix`, of one model or of a recording, and `rewriter batch`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rewriter.base.errors import UsageError
from rewriter.base.text import command_line, count
from rewriter.cli.exits import FAILED, PAGES, STDOUT, UNBUILDABLE, is_page, write_document
from rewriter.cli.parameters import Json, Outputs, Quiet, check_extra, check_outputs, configured, with_options
from rewriter.pipeline.options import RANDOM_DATA, BatchCommand, FixCommand, FixOptions
from rewriter.pipeline.schema import declarations

if TYPE_CHECKING:
    from rewriter.batch.cluster import Connection
    from rewriter.batch.machine import Processes

_OUTPUT = typer.Option("-o", "--output", metavar="OUT", help="The result [MODEL.fixed.onnx]")
Output = Annotated[Path | None, _OUTPUT]
Models = Annotated[list[Path], typer.Argument(metavar="MODEL", hidden=True)]
DEFAULTS = {**declarations(FixCommand), **declarations(BatchCommand)}


@with_options(FixCommand, outputs=("json", "verbose", "quiet"))
def fix(models: Models, outputs: Outputs, output: Output = None, **given: Any) -> None:
    """Rewrite MODEL so that TensorRT builds it in FP16 and it stays accurate.

    Exits with 0 if it is verified, 1 if a check failed, 2 on bad usage or model, 3 if TensorRT cannot build
    the original MODEL. A folder that `rewriter record` wrote stands for all models in it.
    """
    from rewriter import api
    from rewriter.ir.model import data_files, load
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
    if not model.exists():
        load(model)  # says so, before what concerns the output
    if given.pop("loop_seconds", None) is not None:
        hint = "name the folder that `rewriter record` wrote"
        raise UsageError("it is for a recording", option="loop-seconds", hint=hint)
    in_place = given.get("in_place", False)
    if output is None and not (in_place or given.get("dry_run")):
        output = model.with_suffix(".fixed.onnx")
        if output.exists() and not is_result_of(output, model):
            hint = "name the result with -o, or say `in-place` or `dry-run`"
            what = "it exists, and is not replaced unless you name it"
            raise UsageError(what, where=output, hint=hint)
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
    if output is None:
        raise UsageError("it has several models", where=folder, hint="name a folder with -o")
    for name in ("in_place", "dry_run", "save_plan", "inputs", "image_preprocess", *RANDOM_DATA):
        if given.pop(name, None):
            raise UsageError("it is for one model", option=name.replace("_", "-"), hint="name one file")
    if given.get("report") is not None:
        given["report"] = [given["report"]]
    seconds = given.pop("loop_seconds", DEFAULTS["loop_seconds"].default) * given.get("verify", True)
    fix_all([folder], output, given, json=outputs.json, quiet=outputs.quiet, recording=folder, loop_s=seconds)


ManyModels = Annotated[
    list[Path] | None,
    typer.Argument(metavar="[MODELS]...", show_default=False, help="Files, folders, patterns in quotes"),
]
OutputFolder = Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="Output folder")]

JUNIT = ".xml"

SHARE = 0.8  # share of the free memory that a batch may use


@with_options(BatchCommand)
def batch(
    output: OutputFolder, models: ManyModels = None, json: Json = None, quiet: Quiet = False, **given: Any
) -> None:
    """Fix many models, each in a process of its own; skip those that an earlier run finished.

    Samples are taken from net.npz beside net.onnx, if it is there. Exits with 0 if every model passed, with
    1 if one did not, with 2 on bad usage.
    """
    fix_all(models or [], output, given, json=json, quiet=quiet)


def fix_all(
    models: Sequence[Path],
    output: Path,
    given: Mapping[str, Any],
    *,
    json: Path | None,
    quiet: bool,
    recording: Path | None = None,
    loop_s: float = 0.0,
) -> None:
    """Fixes models with the user's options; the loop of a `recording` runs for at most `loop_s` seconds."""
    from rewriter.batch.machine import run_batch
    from rewriter.batch.models import entries
    from rewriter.batch.summary import Summary, as_dict, as_junit, as_page, closed_loop, print_summary
    from rewriter.ir.model import write_text
    from rewriter.report.progress import progress
    from rewriter.report.terminal import console

    start = time.monotonic()
    configuration = configured({}, quiet=quiet).configuration
    listed, reports = given.get("manifest"), given.get("report", [])
    of_fix = {name: value for name, value in given.items() if name in declarations(FixOptions)}
    todo = entries(models, output, of_fix, configuration, listed)
    inputs: list[Path | None] = [part for entry in todo for part in (entry.model, entry.output)]
    inputs += [listed, configuration.file]
    check_extra("json", json, inputs)
    for path in reports:
        check_extra("report", path, inputs, (".json", JUNIT, *PAGES))
    if any(map(is_page, reports)):
        todo = [replace(entry, options={**entry.options, "page": True}) for entry in todo]
    with _workers(given) as (workers, where), progress(shown=not quiet, lines=True) as shown:
        summary = Summary(run_batch(todo, workers.run, shown, again=given.get("again", False)), where)
        if recording is not None:
            summary = closed_loop(recording, summary, loop_s, shown)
    summary = replace(summary, seconds=time.monotonic() - start)
    print_summary(summary, console(stderr=json == STDOUT), quiet=quiet)
    for path in [*reports, *([] if json is None else [json])]:
        if path.suffix.lower() == JUNIT:
            write_text(as_junit(summary), path)
        elif is_page(path):
            write_text(as_page(summary, path, command_line(["rewriter", *sys.argv[1:]])), path)
        else:
            write_document(as_dict(summary), path)
    if not summary.passed:
        raise typer.Exit(FAILED)


@contextmanager
def _workers(given: Mapping[str, Any]) -> Iterator[tuple[Processes | Connection, str]]:
    """The processes or the cluster that run the models, and a name to print."""
    from rewriter.base.sandbox import memory
    from rewriter.batch import cluster, machine, models

    jobs, seconds = given.get("jobs", 0), given.get("time_limit", DEFAULTS["time_limit"].default)
    address, gpus = given.get("ray"), given.get("gpus", 0.0)
    if address is not None:
        with cluster.connected(address, gpus=gpus, jobs=jobs, seconds=seconds) as ray:
            yield ray, f"Ray at {address}"
        return
    if gpus:
        raise UsageError("it needs a Ray cluster", option="gpus", hint="add `ray=ADDRESS`")
    jobs = jobs or max(1, (os.cpu_count() or 2) // 2)
    allowed = given.get("memory")
    budget = int(SHARE * memory("MemAvailable") if allowed is None else allowed * models.GIB)
    workers = machine.Processes(jobs, budget, seconds, strict=allowed is not None)
    yield workers, f"{count(jobs, 'job')} on this machine"
