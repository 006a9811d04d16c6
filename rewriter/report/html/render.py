"""Parts of a page, and the page as HTML: one file with its own script, which loads nothing else.

Names of nodes come from the user's model and may hold anything. The templates escape all text, and the
Content-Security-Policy admits only the page's own style and script, by their hashes.
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from rewriter.base.text import Row, one_line
from rewriter.report import terminal
from rewriter.report.json import installed_versions, shown
from rewriter.report.tables import State, Table
from rewriter.target import Target


class Fact(NamedTuple):
    """A name with its value; `code` marks what a program reads or printed."""

    name: str
    value: str
    code: bool = False


@dataclass(frozen=True)
class Part:
    """A template and the values that it is filled with; all text is escaped."""

    template: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading; `lead` explains it in a sentence or two."""

    id: str
    title: str
    lead: str
    bodies: Sequence[Part]


@dataclass(frozen=True)
class Page:
    """A whole page."""

    verb: str  # the command, such as `fix`
    subject: Path | str | None  # the file that it is about; None for a model in memory
    verdict: str  # one sentence; `state` is its colour
    state: State
    rows: Sequence[Row]  # of the summary on the terminal
    sections: Sequence[Section]
    links: Mapping[str, str] = field(default_factory=dict)  # the id of a graph by a line's text


_POLICY = (
    "default-src 'none'; img-src data:; script-src 'sha256-{script}'; style-src 'sha256-{style}'; "
    "base-uri 'none'; form-action 'none'"
)


def html(page: Page) -> str:
    return _environment().get_template("page.html").render(page=page)


def part(template: str, **values: Any) -> Part:
    return Part(template, values)


def table_sections(tables: Iterable[Table]) -> list[Section]:
    return [
        Section(table.id, table.title, table.lead, [part("table.html", table=table, most=MOST_NAMES)])
        for table in tables
        if table.rows
    ]


def run_section(
    command: str,
    commands: Iterable[tuple[str, str]] = (),
    *,
    facts: Iterable[Fact] = (),
    target: Target | None = None,
    seconds: Mapping[str, float] | None = None,
) -> Section:
    """The last section of every page: what ran, on what, and the command ("" of Python) to run it again.

    `commands` are what to run next, each after the words that say what it does.
    """
    rows = [*facts, *starmap(Fact, terminal.facts(target, seconds))]
    versions = ", ".join(f"{name} {version}" for name, version in installed_versions().items())
    rows.append(Fact("Versions", versions))
    lines = [*commands, *([("Repeats this run", command)] if command else [])]
    lead = "Versions and times, and the commands that repeat and continue this run."
    bodies = [part("command.html", label=label, text=line) for label, line in lines if line]
    return Section("run", "This run", lead, [*bodies, part("facts.html", rows=rows)])


MOST_NAMES = 500  # names that a cell lists; JSON has the others


@cache
def _environment() -> Environment:
    loader = PackageLoader("rewriter.report.html")
    templates = Environment(
        loader=loader,
        autoescape=True,
        finalize=lambda value: (
            one_line(str(value)) if type(value) is str or isinstance(value, Path) else value
        ),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["ticks"] = _with_code
    templates.policies["json.dumps_function"] = lambda value, **more: json.dumps(shown(value), **more)
    script, style = (loader.get_source(templates, name)[0] for name in ("page.js", "page.css"))
    policy = _POLICY.format(script=_hash(script), style=_hash(style))
    templates.globals.update(script=Markup(script), style=Markup(style), policy=policy)
    templates.globals["drawn"] = lambda body: Markup(
        templates.get_template(body.template).render(body.values)
    )
    return templates


def _with_code(text: str) -> Markup:
    """Escaped text, where words between backticks are set as code."""
    parts = one_line(text).split("`")
    if len(parts) % 2 == 0:  # one has no partner: it is a part of a name
        return escape(one_line(text))
    marked = (
        Markup("<code>{}</code>").format(part) if i % 2 else escape(part) for i, part in enumerate(parts)
    )
    return Markup("").join(marked)


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
