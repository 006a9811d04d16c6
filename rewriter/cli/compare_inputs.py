"""`rewriter compare-inputs`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rewriter.cli.exits import FAILED, exit_codes, show
from rewriter.cli.parameters import Json, Quiet, Verbose, check_extra

Ours = Annotated[Path, typer.Argument(metavar="OURS", help="npz, npy, folder, Polygraphy JSON")]
Theirs = Annotated[Path, typer.Argument(metavar="THEIRS", help="The same samples from the other pipeline")]


def compare_inputs(
    ours: Ours,
    theirs: Theirs,
    samples: Annotated[
        int, typer.Option(min=1, metavar="N", help="Samples to look at [8]", show_default=False)
    ] = 8,
    images: Annotated[
        Path | None,
        typer.Option("--images", metavar="FILE", help="The photographs that both read, one for each sample"),
    ] = None,
    json: Json = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Find what differs between two preprocessing pipelines: layout, channel order, scale, resize ...

    Exits with 0 if they do the same, with 1 if they differ, with 2 on bad usage or data.
    """
    with exit_codes():
        from rewriter.parity.job import compare_inputs as job
        from rewriter.report import compare_inputs as report
        from rewriter.report.progress import progress

        check_extra("`json`", json, [ours, theirs, images])
        with progress(shown=not quiet) as shown:
            result = job(ours, theirs, samples=samples, images=images, progress=shown)
        show(result, report, json, verbosity=int(verbose) - int(quiet))
        if result.differ:
            raise typer.Exit(FAILED)
