"""The page of a saved JSON report of `fix`, `scan` or `verify`: its verdict, and a table of every list."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rewriter.ir.english import count
from rewriter.ir.errors import UsageError
from rewriter.report.html.render import Fact, Page, Section, part, table_sections
from rewriter.report.json import SCHEMA_VERSION
from rewriter.report.tables import Cell, Kind, State, Table, number

LEFT_OUT = "This page is made from saved JSON, which has no charts, graphs or pictures"

VERDICTS = {"fix": "verified", "verify": "passed", "scan": "counts"}
"""Commands by the key that only their reports have."""


def page(saved: Any, where: str) -> Page:
    """Returns the page.

    Raises:
        UsageError: it is not the report of one model in today's form; names `where`.
    """
    try:
        verb = next(
            verb
            for verb, key in VERDICTS.items()
            if key in saved and saved["schema_version"] == SCHEMA_VERSION
        )
        return _page(verb, saved, saved.get("counts", {}), saved.get("conclusion", {}))
    except (AttributeError, KeyError, StopIteration, TypeError) as error:
        hint = "give what fix, scan or verify wrote with --json, for one model"
        raise UsageError("it is no report that has a page", where=where, hint=hint) from error


def _page(verb: str, saved: Any, counts: Mapping[str, int], conclusion: Mapping[str, str]) -> Page:
    bad = counts.get("error") or False in (saved.get("passed"), saved.get("verified"))
    state: State = "bad" if bad else "good" if saved.get("proven", not counts.get("warning")) else "warn"
    tables = [(name, rows) for name, rows in _lists(saved) if rows and isinstance(rows[0], Mapping)]
    subject = str(saved.get("output") or saved.get("fixed") or saved["input"] or "a model in memory")
    verdict = saved.get("ending") or ", ".join(count(many, kind) for kind, many in counts.items())
    rows = [(_title(key), conclusion[key]) for key in ("limit", "remedy") if conclusion.get(key)]
    rows += [("Note", warning) for warning in (LEFT_OUT, *saved["warnings"])]
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
    return number(value) if _numeric(value) else Cell(_line(value))


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
