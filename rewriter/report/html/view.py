"""The content of a page, as plain data: the templates show it and compute nothing.

Colours are names of CSS classes: `good`, `warn`, `bad` and `plain` for states; those of precisions are in
`Legend`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

State = Literal["good", "warn", "bad", "plain"]


@dataclass(frozen=True)
class Tile:
    """One key figure under the verdict, with a remark in small print."""

    label: str
    value: str
    note: str = ""
    state: State = "plain"


@dataclass(frozen=True)
class Fact:
    """A name with its value; `code` marks what a program reads or printed, `link` is the id of a graph."""

    name: str
    value: str
    code: bool = False
    link: str = ""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        number: True if cells sort by number and stand on the right.
        choices: True if the column has few values, and a menu to choose one.
        code: True for names of nodes and tensors.
    """

    name: str
    number: bool = False
    choices: bool = False
    code: bool = False


@dataclass(frozen=True)
class Cell:
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


@dataclass(frozen=True)
class Table:
    """A table that sorts by every column and filters by text and by choices."""

    template: ClassVar[str] = "table.html"
    id: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    empty: str = "There is nothing to list."

    def choices(self, index: int) -> list[str]:
        """The different texts of a column, in their order."""
        return sorted({row[index].text for row in self.rows})


@dataclass(frozen=True)
class Facts:
    """Names and values, one a line."""

    template: ClassVar[str] = "facts.html"
    rows: Sequence[Fact]


@dataclass(frozen=True)
class Command:
    """A line to be copied into a shell."""

    template: ClassVar[str] = "command.html"
    label: str
    text: str


@dataclass(frozen=True)
class Image:
    """A picture as a data URI."""

    uri: str
    caption: str
    alt: str


@dataclass(frozen=True)
class Boxes:
    """Boxes of detections over a picture: a CSS class, and left, top, width and height, each."""

    uri: str
    width: int
    height: int
    rows: Sequence[tuple[str, Sequence[tuple[float, float, float, float]]]]
    alt: str


@dataclass(frozen=True)
class Output:
    """The error of one output.

    Attributes:
        error, allowed: Positions on the logarithmic scale, 0 to 100; None: not on the scale, or no limit.
        before: Position of the error before the repairs.
        gauge: The scale in a sentence.
        words: Best classes or tokens by model, each with True where it is the original's.
    """

    name: str
    state: State
    sentence: str
    error: float | None
    allowed: float | None
    facts: Sequence[Fact]
    images: Sequence[Image] = ()
    before: float | None = None
    gauge: str = ""
    words: Sequence[tuple[str, Sequence[tuple[str, bool]]]] = ()
    boxes: Boxes | None = None


@dataclass(frozen=True)
class Outputs:
    """A card for each output."""

    template: ClassVar[str] = "outputs.html"
    cards: Sequence[Output]


@dataclass(frozen=True)
class Tick:
    """A mark on an axis, at a position in units of the drawing."""

    at: float
    text: str


@dataclass(frozen=True)
class Layer:
    """All tensors of one kind in the chart of ranges, as one path.

    Attributes:
        kind: CSS class. `label`: its line in the legend.
    """

    kind: str
    label: str
    path: str
    count: int


@dataclass(frozen=True)
class Run:
    """Neighbours along the depth that compute in one type."""

    start: float
    width: float
    kind: str
    title: str
    nodes: int


@dataclass(frozen=True)
class DepthChart:
    """Ranges of tensors along the depth of the network, on a logarithmic scale, with the strip of islands.

    Attributes:
        width: Places along the depth: the unit of x. `height`: of the drawing, in pixels.
        stroke: Width of one bar in pixels of a drawing 1000 pixels wide.
        limits: Heights of FP16's largest, smallest normal and smallest subnormal number.
        data: Columns of every tensor, for the cursor.
        summary: The chart in a sentence. `strip_summary`: the strip under it.
        errors: Curves of errors by tensor, below the strip; `error_ticks`: marks of their scale.
    """

    template: ClassVar[str] = "depth.html"
    width: int
    height: float
    stroke: float
    layers: Sequence[Layer]
    marks: Sequence[Layer]
    ticks: Sequence[Tick]
    limits: tuple[float, float, float]
    runs: Sequence[Run]
    strip_label: str
    strip_summary: str
    data: Mapping[str, Any]
    summary: str
    note: str = ""
    errors: Sequence[Layer] = ()
    error_ticks: Sequence[Tick] = ()


@dataclass(frozen=True)
class Box:
    """A node of a graph, by its left top corner; `kind` is the CSS class of its type."""

    x: float
    y: float
    op: str
    name: str
    title: str
    kind: str
    centre: bool


@dataclass(frozen=True)
class Edge:
    """A tensor between two nodes with its largest value; `beyond`: too large for FP16; `cast`: it is cast."""

    path: str
    x: float
    y: float
    text: str
    beyond: bool
    cast: bool


@dataclass(frozen=True)
class Graph:
    """The nodes round a cause; `nodes` are the names of all that it concerns."""

    id: str
    title: str
    nodes: Sequence[str]
    boxes: Sequence[Box]
    edges: Sequence[Edge]
    width: float
    height: float
    summary: str


@dataclass(frozen=True)
class Graphs:
    """Graphs side by side, with one legend of CSS classes and labels."""

    template: ClassVar[str] = "graphs.html"
    graphs: Sequence[Graph]
    legend: Sequence[tuple[str, str]]


Body = Table | Facts | Command | Outputs | DepthChart | Graphs


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading; `lead` explains it in a sentence or two."""

    id: str
    title: str
    lead: str
    bodies: Sequence[Body]


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
