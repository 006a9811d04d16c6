"""The content of a page, as plain data: the templates show it and compute nothing.

Colours are names of CSS classes: `good`, `warn`, `bad` and `plain` for states; those of precisions are in
`depth.LABELS`. Parts of sections are HTML already, which `render.part` makes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from rewriter.report.tables import State
from rewriter.report.terminal import Row


class Fact(NamedTuple):
    """A name with its value; `code` marks what a program reads or printed."""

    name: str
    value: str
    code: bool = False


class Image(NamedTuple):
    """A picture as a data URI."""

    uri: str
    caption: str
    alt: str


class Boxes(NamedTuple):
    """Boxes of detections over a picture: a CSS class, and left, top, width and height, each."""

    uri: str
    width: int
    height: int
    rows: Sequence[tuple[str, Sequence[tuple[float, float, float, float]]]]
    alt: str


Words = Sequence[tuple[str, Sequence[tuple[str, bool]]]]
"""Best classes or tokens by model, each with True where it is the original's."""


class Section(NamedTuple):
    """A part of the page with a heading; `lead` explains it in a sentence or two."""

    id: str
    title: str
    lead: str
    bodies: Sequence[Markup]


@dataclass(frozen=True)
class Page:
    """A whole page.

    Attributes:
        verb: The command, such as `fix`. `subject`: the file that it is about; None for a model in memory.
        verdict: One sentence; `state` is its colour.
        rows: The lines of the summary on the terminal; `links` has the id of a graph by a line's text.
    """

    verb: str
    subject: Path | str | None
    verdict: str
    state: State
    rows: Sequence[Row]
    sections: Sequence[Section]
    links: Mapping[str, str] = field(default_factory=dict)
