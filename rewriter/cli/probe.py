"""`rewriter probe`."""

from __future__ import annotations

from typing import Annotated

from rewriter.cli.exits import show
from rewriter.cli.parameters import FLAG, Json, Quiet, Verbose, check_outputs, option
from rewriter.pipeline.options import OUTCOME


def probe(
    engine: Annotated[
        str, option(OUTCOME, "NAME", "auto (the best on this GPU), tensorrt, tensorrt-rtx or onnxruntime")
    ] = "auto",
    ask: Annotated[bool, option(OUTCOME, FLAG, "Build and run every question's graph here, now")] = False,
    json: Json = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Print what is known of this TensorRT and GPU in FP16; with --ask, measure it and keep it for `fix`."""
    from rewriter.jobs.probe import probe as job
    from rewriter.report import probe as report
    from rewriter.report.progress import progress

    check_outputs([], json=json)
    with progress(shown=not quiet) as shown:
        answers = job(engine, ask=ask, progress=shown)
    show(answers, report, json, verbosity=int(verbose) - int(quiet))
