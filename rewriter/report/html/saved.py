"""The page of a saved JSON report of `fix`, `scan` or `verify`: its verdict, and a table of every list."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rewriter.base.errors import UsageError
from rewriter.base.text import count
from rewriter.ir.reading import content_of, from_json
from rewriter.report.html.render import Fact, Page, Section, part, table_sections
from rewriter.report.tables import Cell, Kind, State, Table, number

LEFT_OUT = "This page is made from saved JSON, which has no charts, graphs or pictures"

HINT = "give what fix, scan or verify wrote with --json, for one model"

VERDICTS = {"fix": "verified", "verify": "passed", "scan": "counts"}
"""Commands by the key that only their reports have."""


@dataclass(frozen=True)
class Report:
    """The keys of a report that a page reads by name; it shows all others as they are."""

    schema_version: Literal[1]
    warnings: tuple[str, ...]
    counts: Mapping[str, int] = field(default_factory=dict)
    conclusion: Mapping[str, Any] = field(default_factory=dict)
    passed: bool | None = None
    verified: bool | None = None
    proven: bool | None = None
    ending: str = ""
    input: str | None = None
    output: str | None = None
    fixed: str | None = None


def page(path: Path) -> Page:
    """Returns the page of a saved report.

    Raises:
        UsageError: it is not the report of one model in today's form; names the file and the key.
    """
    content, where = content_of(path, HINT), str(path)
    report: Report = from_json(content, Report, where, HINT, extra="ignore")
    saved: dict[str, Any] = from_json(content, dict[str, Any], where, HINT)
    if verb := next((verb for verb, key in VERDICTS.items() if key in saved), None):
        return _page(verb, report, saved)
    raise UsageError("it is no report that has a page", where=where, hint=HINT)


def _page(verb: str, report: Report, saved: Mapping[str, Any]) -> Page:
    bad = report.counts.get("error") or False in (report.passed, report.verified)
    good = not report.counts.get("warning") if report.proven is None else report.proven
    state: State = "bad" if bad else "good" if good else "warn"
    tables = [(name, rows) for name, rows in _lists(saved) if rows and all(isinstance(r, dict) for r in rows)]
    subject = report.output or report.fixed or report.input or "a model in memory"
    verdict = report.ending or ", ".join(count(many, kind) for kind, many in report.counts.items())
    rows = [(_title(key), text) for key in ("limit", "remedy") if (text := _line(report.conclusion.get(key)))]
    rows += [("Note", warning) for warning in (LEFT_OUT, *report.warnings)]
    run = Section("run", "This run", "", [part("facts.html", rows=list(_facts(saved)))])
    sections = [*table_sections(_table(name, rows) for name, rows in reversed(tables)), run]
    return Page(verb, subject, verdict, state, rows, sections)


def _title(name: str) -> str:
    return name.replace("_", " ").replace("-", ", ").capitalize()


def _lists(saved: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[Any]]]:
    for name, value in saved.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}-{inner}", rows) for inner, rows in _lists(value))
        elif isinstance(value, list):
            yield name, value


def _table(name: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    keys = [key for key in rows[0] if any(row.get(key) not in (None, "", []) for row in rows)]
    columns: dict[str, Kind] = {_title(key): "number" if _numeric(rows[0][key]) else "text" for key in keys}
    return Table(columns, [[_cell(row.get(key)) for key in keys] for row in rows], name, _title(name))


def _numeric(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _cell(value: Any) -> Cell:
    if isinstance(value, list):
        return Cell("", names=tuple(map(_line, value)))
    return (
        number(value, "{:d}" if isinstance(value, int) else "{:.3g}")
        if _numeric(value)
        else Cell(_line(value))
    )


def _line(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_line(one)}" for key, one in value.items() if one not in (None, "", []))
    if isinstance(value, list):
        return ", ".join(map(_line, value))
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _facts(saved: Mapping[str, Any]) -> Iterator[Fact]:
    for name, value in saved.items():
        if isinstance(value, Mapping):
            value = {key: one for key, one in value.items() if not isinstance(one, list)}
        if text := "" if isinstance(value, list) else _line(value):
            yield Fact(_title(name), text, code=name.startswith("next_"))
