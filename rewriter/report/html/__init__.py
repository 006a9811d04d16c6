"""Results as one self-contained HTML page: the terminal's report, with drawings, and tables that sort.

`write` takes the result of any command, and `render` turns a page into HTML with the templates beside it.
"""

from __future__ import annotations

from functools import singledispatch
from pathlib import Path
from typing import Any

from rewriter.base.errors import UsageError
from rewriter.base.text import article
from rewriter.ir.model import write_text
from rewriter.jobs.findings import ScanResult
from rewriter.jobs.fix.result import FixResult
from rewriter.report import locate, scan, verify
from rewriter.report.checks import judging_check
from rewriter.report.html import fix, saved
from rewriter.report.html.outputs import pictures_section
from rewriter.report.html.render import Fact, Page, html, run_section, table_sections
from rewriter.verification.locate.location import Location
from rewriter.verification.verify_result import VerifyResult


def as_html(result: Any, command: str = "") -> str:
    """Returns the page of a result of `fix`, `scan`, `verify` or `locate`; `command` repeats the run."""
    return html(_page(result, command))


def saved_page(result: Any, command: str = "") -> dict[str, Any]:
    """Returns the key of a JSON report that `rewriter report` draws; no key if a result has no page."""
    known = _page.dispatch(type(result)) is not _page.dispatch(object)
    return {"page": saved.as_data(_page(result, command))} if known else {}


def write(result: Any, path: Path, command: str = "") -> None:
    """Write the page of a result; see `as_html`.

    Raises:
        OutputError: the file cannot be written.
    """
    write_text(as_html(result, command), path)


@singledispatch
def _page(result: Any, command: str) -> Page:
    hint = "give what fix, scan, verify or locate returned"
    raise UsageError(f"there is no page of {article(type(result).__name__)}", where="result=", hint=hint)


_page.register(FixResult, fix.page)


@_page.register
def _(result: ScanResult, command: str) -> Page:
    commands = [("Repairs what was found", scan.next_command(result))]
    run = run_section(command, commands, target=result.target, seconds=result.seconds)
    line, state, rows = scan.verdict_line(result), scan.state(result), list(scan.rows(result))
    return Page("scan", result.path, line, state, rows, [*table_sections(scan.tables(result)), run])


@_page.register
def _(result: VerifyResult, command: str) -> Page:
    judging = judging_check(result.checks)
    commands = [("Finds the tensor that goes wrong first", verify.next_command(result))]
    allowed = f"{result.tolerance.metric} {result.tolerance.value:.3g}: {result.tolerance.source}"
    facts = [Fact("Original", str(result.original or "in memory"), code=True), Fact("Allowed", allowed)]
    sections = [
        *(pictures_section(judging) if judging else ()),
        *table_sections(verify.tables(result)),
        run_section(command, commands, facts=facts, seconds=result.seconds),
    ]
    line, state = verify.verdict_line(result), verify.state(result)
    return Page("verify", result.fixed, line, state, list(verify.rows(result)), sections)


@_page.register
def _(found: Location, command: str) -> Page:
    facts = [Fact("Original", str(found.original or "in memory"), code=True)]
    sections = [*table_sections(locate.tables(found)), run_section(command, facts=facts)]
    line, state = locate.verdict_line(found), locate.state(found)
    return Page("locate", found.other, line, state, list(locate.rows(found)), sections)
