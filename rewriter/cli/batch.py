"""`rewriter batch`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rewriter.base.errors import UsageError
from rewriter.base.text import command_line, count
from rewriter.cli.exits import FAILED, PAGES, STDOUT, is_page, write_document
from rewriter.cli.parameters import Json, Quiet, check_extra, configured, with_options
from rewriter.pipeline.options import BatchCommand, FixOptions
from rewriter.pipeline.schema import declarations

if TYPE_CHECKING:
    from rewriter.batch.cluster import Connection
    from rewriter.batch.machine import Processes

Models = Annotated[
    list[Path] | None,
    typer.Argument(metavar="[MODELS]...", show_default=False, help="Files, folders, patterns in quotes"),
]
Output = Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="Output folder")]

JUNIT = ".xml"
DEFAULTS = declarations(BatchCommand)

SHARE = 0.8  # share of the free memory that a batch may use


@with_options(BatchCommand)
def batch(
    output: Output, models: Models = None, json: Json = None, quiet: Quiet = False, **given: Any
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
    from rewriter.batch import cluster, machine, state

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
    budget = int(SHARE * memory("MemAvailable") if allowed is None else allowed * state.GIB)
    workers = machine.Processes(jobs, budget, seconds, strict=allowed is not None)
    yield workers, f"{count(jobs, 'job')} on this machine"
