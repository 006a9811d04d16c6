"""Results as one self-contained HTML page: a verdict, charts, and tables that sort and filter.

`write` takes the result of any command. `view` says what a page consists of, one module for each command
fills it, and `render` turns it into HTML with the templates beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rewriter.ir.english import article
from rewriter.ir.errors import UsageError
from rewriter.ir.model import write_text
from rewriter.jobs.findings import ScanResult
from rewriter.jobs.fix.result import FixResult
from rewriter.judge.locate.location import Location
from rewriter.judge.verify_result import VerifyResult
from rewriter.report.html import fix, locate, scan, verify
from rewriter.report.html.render import html
from rewriter.report.html.view import Page

PAGES: dict[type, Callable[[Any, str], Page]] = {
    FixResult: fix.page,
    ScanResult: scan.page,
    VerifyResult: verify.page,
    Location: locate.page,
}


def as_html(result: Any, command: str = "") -> str:
    """Returns the page of a result.

    Args:
        result: Of `fix`, `scan`, `verify` or `locate`.
        command: The command line that repeats the run; "" if there is none.
    """
    made = PAGES.get(type(result))
    if made is None:
        hint = "give what fix, scan, verify or locate returned"
        raise UsageError(f"there is no page of {article(type(result).__name__)}", where="result=", hint=hint)
    return html(made(result, command))


def write(result: Any, path: Path, command: str = "") -> None:
    """Write the page of a result; see `as_html`.

    Raises:
        OutputError: the file cannot be written.
    """
    write_text(as_html(result, command), path)
