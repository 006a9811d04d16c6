"""The page of a saved JSON report: `page` in it has the data that the templates draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateError

from rewriter.base.errors import UsageError
from rewriter.ir.reading import read_json
from rewriter.report.html.render import Page, html
from rewriter.report.json import plain

HINT = "give a file that fix, scan, verify or locate wrote with --json, for one model"


@dataclass(frozen=True)
class Saved:
    """The keys of a report that a page needs."""

    schema_version: Literal[1]
    page: Page


def as_data(page: Page) -> dict[str, Any]:
    """Returns a page as plain data for JSON; `as_html` draws it again."""
    return {field.name: plain(_named(getattr(page, field.name))) for field in fields(page)}


def _named(value: Any) -> Any:
    """Named tuples and data classes as dicts, since templates read their parts by name."""
    names: Sequence[str] = getattr(value, "_fields", ())
    if is_dataclass(value):
        names = [field.name for field in fields(value)]
    if names:
        return {name: _named(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {key: _named(part) for key, part in value.items()}
    return [*map(_named, value)] if isinstance(value, (list, tuple)) else value


def as_html(path: Path) -> str:
    """Returns the page of a saved report.

    Raises:
        UsageError: it is not the report of one model in today's form; names the file and the key.
    """
    saved: Saved = read_json(path, Saved, HINT, extra="ignore")
    try:
        return html(saved.page)
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise UsageError("it has a page that cannot be drawn", where=str(path), hint=HINT) from error
