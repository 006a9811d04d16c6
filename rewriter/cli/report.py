"""`rewriter report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rewriter.cli.exits import exit_codes, is_page, reader_may_leave, write_page
from rewriter.cli.parameters import Quiet, Verbose, check_extra
from rewriter.errors import UsageError

First = Annotated[Path, typer.Argument(metavar="A.json", help="Report of a run of fix, scan or verify")]
Second = Annotated[Path, typer.Argument(metavar="B.json", help="Report of another run of that command")]
Output = Annotated[
    Path | None,
    typer.Option("-o", "--output", metavar="PAGE.html", help="Write a page, too", show_default=False),
]


def report(
    before: First, after: Second, output: Output = None, verbose: Verbose = False, quiet: Quiet = False
) -> None:
    """Compare two runs by their JSON reports: errors, latency, plan, changes, conditions.

    Exits with 0, with 2 if a file is no report.
    """
    with exit_codes():
        from rewriter.report import runs
        from rewriter.report.terminal import console

        check_extra("-o", output, [before, after])
        if output is not None and not is_page(output):
            raise UsageError("it is not called .html", where=f"-o {output}", hint="name a page: -o page.html")
        found = runs.compare_runs(before, after)
        if output is not None:
            write_page(found, output)
        with reader_may_leave():
            runs.print_comparison(found, console(), verbosity=int(verbose) - int(quiet))
