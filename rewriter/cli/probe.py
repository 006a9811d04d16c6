"""`rewriter probe`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from rewriter.cli.exits import exit_codes, is_page, reader_may_leave, write_page
from rewriter.cli.parameters import FLAG, Report, Verbose, check_extra, option
from rewriter.pipeline.options import OUTCOME


def probe(
    engine: Annotated[
        str, option(OUTCOME, "NAME", "auto (the best on this GPU), tensorrt, tensorrt-rtx or onnxruntime")
    ] = "auto",
    again: Annotated[bool, option(OUTCOME, FLAG, "Measure, although the answers are known")] = False,
    json: Annotated[Path | None, option(OUTCOME, "FILE", "Write the answers as JSON, too")] = None,
    written: Report = None,
    verbose: Verbose = False,
) -> None:
    """Ask this machine's TensorRT and GPU what they do in FP16, and keep the answers for `fix`.

    Without a GPU: build the probes' models, and show the recorded answers.
    """
    with exit_codes():
        from rewriter.engines import this_machine
        from rewriter.engines.probe.answers import write
        from rewriter.jobs.probe import probe as job
        from rewriter.report import probe as report
        from rewriter.report.progress import progress
        from rewriter.report.terminal import console

        check_extra("--json", json, [])
        check_extra("--report", written, [])
        choice = this_machine.choose(engine)
        if choice.engine is None:
            if written is not None and not is_page(written):
                json = written
            _without_gpu("; ".join(choice.reasons), json, written)
            return
        with progress(shown=True) as shown:
            found = job(choice.engine, again=again, progress=shown)
        if written is not None and is_page(written):
            write_page(found, written)
            written = None
        for path in (json, written):
            if path is not None:
                write(found, path)
        with reader_may_leave():
            report.print_answers(found, console(), verbose=verbose)


def _without_gpu(reasons: str, json: Path | None, page: Path | None) -> None:
    from rewriter.engines.probe.answers import recorded
    from rewriter.engines.probe.ask import build_all
    from rewriter.errors import EngineError
    from rewriter.report import probe as report
    from rewriter.report.progress import progress
    from rewriter.report.terminal import console

    if json is not None:
        raise EngineError(
            f"nothing was measured, so there is nothing to write: {reasons}",
            where=f"--json {json}",
            hint="run it on a machine with a GPU",
        )
    out = console()
    out.print(f"Nothing can be measured here: {reasons}", soft_wrap=True)
    try:
        with progress(shown=True) as shown:
            builds = list(build_all(progress=shown))
        report.print_builds(builds, out)
    except EngineError as error:
        out.print(f"The probes' models were not built: {error.what}", soft_wrap=True)
    if page is not None:
        write_page(recorded(), page)
    with reader_may_leave():
        for answers in recorded():
            report.print_answers(answers, out)
