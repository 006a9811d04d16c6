"""`rewriter report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rewriter.cli.exits import PAGES
from rewriter.cli.parameters import check_extra, option
from rewriter.pipeline.options import OUTCOME


def report(
    saved: Annotated[Path, typer.Argument(metavar="RUN.json", help="JSON that fix, scan or verify wrote")],
    output: Annotated[Path, option(OUTCOME, "FILE", "The page", "-o", "--output")],
) -> None:
    """Make the page of a saved JSON report.

    It is the page that the command wrote, or would have written, with --report FILE.html.
    """
    from rewriter.ir.model import write_text
    from rewriter.report.html import html_of_saved

    check_extra("output", output, [saved], PAGES)
    write_text(html_of_saved(saved), output)
