"""`rewriter probe`."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from rewriter.cli.parameters import FLAG, Json, Outputs, Quiet, Verbose, option
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

    outputs = Outputs(json, verbose=verbose, quiet=quiet)
    outputs.check([])
    outputs.run(partial(job, engine, ask=ask), report)
