"""`rewriter compare-inputs`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rewriter.cli.exits import FAILED, as_json, exit_codes, show
from rewriter.cli.parameters import check_extra, option
from rewriter.pipeline.options import OUTCOME

Ours = Annotated[Path, typer.Argument(metavar="OURS", help="npz, npy, folder, Polygraphy JSON")]
Theirs = Annotated[Path, typer.Argument(metavar="THEIRS", help="The same samples from the other pipeline")]


def compare_inputs(
    ours: Ours,
    theirs: Theirs,
    samples: Annotated[
        int, typer.Option(min=1, metavar="N", help="Samples to look at [8]", show_default=False)
    ] = 8,
    json: Annotated[Path | None, option(OUTCOME, "FILE", "Write the result as JSON, too")] = None,
) -> None:
    """Find what differs between two preprocessing pipelines: layout, channel order, scale, crop ...

    Exits with 0 if they do the same, with 1 if they differ, with 2 on bad usage or data.
    """
    with exit_codes():
        from rewriter.jobs.compare_inputs import compare_inputs as job
        from rewriter.report import compare_inputs as report
        from rewriter.report.progress import progress

        check_extra("--json", json, [ours, theirs])
        with progress(shown=True) as shown:
            result = job(ours, theirs, samples=samples, progress=shown)
        show(result, report, as_json(result, report, json))
        if result.differ:
            raise typer.Exit(FAILED)
