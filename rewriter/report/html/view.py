"""The content of a page, as plain data: the templates show it and compute nothing.

Colours are names of CSS classes: `good`, `warn`, `bad` and `plain` for states; those of precisions are in
`depth.LABELS`. Parts of sections are HTML already, which `render.part` makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from markupsafe import Markup

State = Literal["good", "warn", "bad", "plain"]


class Tile(NamedTuple):
    """One key figure under the verdict, with a remark in small print."""

    label: str
    value: str
    note: str = ""
    state: State = "plain"


class Fact(NamedTuple):
    """A name with its value; `code` marks what a program reads or printed, `link` is the id of a graph."""

    name: str
    value: str
    code: bool = False
    link: str = ""


class Column(NamedTuple):
    """A column of a table: of numbers, of few different values with a menu to choose one, or of names."""

    name: str
    number: bool = False
    choices: bool = False
    code: bool = False


class Cell(NamedTuple):
    """One cell.

    Attributes:
        order: What it sorts by in a column of numbers; None comes last.
        names: Nodes, or other lines, that the cell lists on demand; `rest`: how many more there are.
        unit: What `names` are. `link`: the id of a graph of them.
    """

    text: str
    order: float | None = None
    state: State = "plain"
    names: tuple[str, ...] = ()
    rest: int = 0
    unit: str = "nodes"
    link: str = ""


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
        verb: The command, such as `fix`. `subject`: the file that it is about.
        verdict: One sentence; `state` is its colour.
        reasons: Of a failure: its cause, the nodes, and what to do.
        warnings: Sentences that the reader should know before the rest.
    """

    verb: str
    subject: str
    verdict: str
    state: State
    tiles: Sequence[Tile]
    warnings: Sequence[str]
    sections: Sequence[Section] = ()
    reasons: Sequence[Fact] = ()
