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
    """Print what is known of this TensorRT and GPU in FP16; with --ask, measure it and keep it for `fix`.

    Without a GPU, --ask builds the graphs and does not run them.
    """
    from rewriter.jobs.probe import probe as job
    from rewriter.report import probe as report
    from rewriter.report.progress import progress
    from rewriter.runtime.engines import this_machine

    check_outputs([], json=json)
    verbosity = int(verbose) - int(quiet)
    choice = this_machine.choose(engine) if ask else None
    if choice is not None and choice.engine is None and json is None:
        _build("; ".join(choice.reasons), shown=not quiet)
        return
    with progress(shown=not quiet) as shown:
        found = job(engine, ask=ask, progress=shown)
    show(found, report, json, verbosity=verbosity)


def _build(reasons: str, *, shown: bool) -> None:
    """Build the graphs where nothing can be measured."""
    from rewriter.hazards.quirks import every_probe
    from rewriter.report.probe import print_builds
    from rewriter.report.progress import progress
    from rewriter.report.terminal import console
    from rewriter.runtime.engines.probe.ask import build_all

    out = console()
    out.print(f"Nothing can be measured here: {reasons}", soft_wrap=True)
    with progress(shown=shown) as bar:
        builds = list(build_all(every_probe(), progress=bar))
    print_builds(builds, out)
