"""`rewriter probe`."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from rewriter.cli.parameters import FLAG, Outputs, option, with_options
from rewriter.pipeline.options import OUTCOME, VerifyOptions


@with_options(VerifyOptions, "engine", outputs=("json", "verbose", "quiet"))
def probe(
    outputs: Outputs,
    ask: Annotated[
        bool, option(OUTCOME, FLAG, "Build and run every question's graph here, now", "--ask")
    ] = False,
    **given: Any,
) -> None:
    """Print how this TensorRT and GPU compute in FP16; with --ask, measure it and keep it for `fix`."""
    from rewriter.jobs.probe import probe as job
    from rewriter.report import probe as report

    outputs.check([])
    outputs.run(partial(job, ask=ask, **given), report)
