"""`rewriter locate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rewriter.cli.exits import FAILED, is_page, show
from rewriter.cli.parameters import Json, Quiet, Report, Verbose, check_extra, option, with_options
from rewriter.pipeline.options import ENGINE, VerifyOptions

SEARCH = "Search"
_SHARED = (
    "inputs",
    "image_preprocess",
    "input_shapes",
    "seed",
    "engine",
    "plugin_lib",
    "min_shapes",
    "opt_shapes",
    "max_shapes",
)
"""Options that `locate` has in common with `verify`."""

Original = Annotated[Path, typer.Argument(metavar="ORIGINAL", help="The model as it was, taken in FP32")]
Other = Annotated[Path, typer.Argument(metavar="OTHER", help="The model that goes wrong")]


@with_options(VerifyOptions, *_SHARED)
def locate(
    original: Original,
    other: Other,
    timeout: Annotated[float, option(ENGINE, "SECONDS", "For each build, and for each run [600]")] = 600.0,
    tolerance: Annotated[
        float, typer.Option(min=0.0, metavar="X", help="Error that is wrong [5e-3]", show_default=False)
    ] = 5e-3,
    marks: Annotated[int, option(SEARCH, "N", "Tensors to mark in one build [8]")] = 8,
    max_builds: Annotated[int, option(SEARCH, "N", "Builds to make at most [48]")] = 48,
    written: Report = None,
    json: Json = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
    **given: Any,
) -> None:
    """Find the first tensor at which OTHER leaves ORIGINAL when an engine runs it.

    Engine: auto, tensorrt, tensorrt-rtx, onnxruntime, onnxruntime-cuda, emulation

    Exits with 0 if nothing is wrong, with 1 if something is, with 2 on bad usage or model.
    """
    from rewriter.jobs.locate import locate as job
    from rewriter.report import locate as report
    from rewriter.report.progress import progress

    for flag, path in (("--json", json), ("--report", written)):
        check_extra(flag, path, [original, other, given.get("inputs")])
    given |= {"tolerance": tolerance, "marks": marks, "max_builds": max_builds, "timeout": timeout}
    given["ranges"] = written is not None and is_page(written)
    with progress(shown=not quiet) as shown:
        found = job(original, other, **given, progress=shown)
    show(found, report, json, written, verbosity=int(verbose) - int(quiet))
    if found.wrong:
        raise typer.Exit(FAILED)
