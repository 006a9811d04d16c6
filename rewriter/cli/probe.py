"""`rewriter probe`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from rewriter.cli.exits import exit_codes, is_page, reader_may_leave, show, write_page
from rewriter.cli.parameters import FLAG, Json, Quiet, Report, Verbose, check_extra, option
from rewriter.pipeline.options import OUTCOME


def probe(
    engine: Annotated[
        str, option(OUTCOME, "NAME", "auto (the best on this GPU), tensorrt, tensorrt-rtx or onnxruntime")
    ] = "auto",
    again: Annotated[bool, option(OUTCOME, FLAG, "Measure, although the answers are known")] = False,
    json: Json = None,
    written: Report = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Ask this machine's TensorRT and GPU what they do in FP16, and keep the answers for `fix`.

    Without a GPU: build the probes' models, and show the recorded answers.
    """
    with exit_codes():
        from rewriter.jobs.probe import probe as job
        from rewriter.report import probe as report
        from rewriter.report.progress import progress
        from rewriter.runtime.engines import this_machine

        check_extra("`json`", json, [])
        check_extra("`report`", written, [])
        choice = this_machine.choose(engine)
        if choice.engine is None:
            if written is not None and not is_page(written):
                json = written
            _without_gpu("; ".join(choice.reasons), json, written, verbosity=int(verbose) - int(quiet))
            return
        with progress(shown=not quiet) as shown:
            found = job(choice.engine, again=again, progress=shown)
        show(found, report, json, written, verbosity=int(verbose) - int(quiet))


def _without_gpu(reasons: str, json: Path | None, page: Path | None, *, verbosity: int) -> None:
    from rewriter.hazards.quirks import every_probe
    from rewriter.ir.errors import EngineError
    from rewriter.report import probe as report
    from rewriter.report.progress import progress
    from rewriter.report.terminal import console
    from rewriter.runtime.engines.probe.answers import recorded
    from rewriter.runtime.engines.probe.ask import build_all

    if json is not None:
        raise EngineError(
            f"nothing was measured, so there is nothing to write: {reasons}",
            where=f"`json` {json}",
            hint="run it on a machine with a GPU",
        )
    out = console()
    out.print(f"Nothing can be measured here: {reasons}", soft_wrap=True)
    if page is not None:
        write_page(recorded(), page)
    if verbosity < 0:
        return
    try:
        with progress(shown=True) as shown:
            builds = list(build_all(every_probe(), progress=shown))
        report.print_builds(builds, out)
    except EngineError as error:
        out.print(f"The probes' models were not built: {error.what}", soft_wrap=True)
    with reader_may_leave():
        for answers in recorded():
            report.print_result(answers, out, verbosity=verbosity)
