"""Tables of results as data: the terminal prints them, and a page makes them sort and filter."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

State = Literal["good", "warn", "bad", "plain"]
Kind = Literal["text", "number", "choice", "code"]
"""The kind of a column: sentences, numbers, few different words, or names of nodes."""

NAME = re.compile(r"[^\s,;:()'\"]*[/_][^\s,;:()'\"]*")  # a name of a node or tensor in a sentence

Item = TypeVar("Item")


class Cell(NamedTuple):
    """One cell."""

    text: str
    order: float | None = None  # what it sorts by in a column of numbers; None comes last
    state: State = "plain"
    names: tuple[str, ...] = ()  # nodes, or other lines, that a page lists on demand
    link: str = ""  # the id of the graph round these nodes on a page
    page: str = ""  # another page, relative to this one


@dataclass(frozen=True)
class Table:
    """A table; `lead` explains it in a sentence on a page."""

    columns: Mapping[str, Kind]
    rows: Sequence[Sequence[Cell]]
    id: str = ""
    title: str = ""
    lead: str = ""


def table(name: str, title: str, lead: str, columns: Mapping[str, Kind], rows: Iterable[list[Cell]]) -> Table:
    """Returns a table without the columns that are empty."""
    filled = list(rows)
    used = [i for i in range(len(columns)) if any(row[i].text for row in filled)]
    kinds = list(columns.items())
    left = [[row[i] for i in used] for row in filled]
    return Table(dict(kinds[i] for i in used), left, name, title, lead)


def number(value: float | None, form: str = "{:.3g}") -> Cell:
    """A cell with a number; empty for None."""
    return Cell("") if value is None else Cell(form.format(value), order=value)


def grouped(items: Iterable[Item], text: Callable[[Item], str]) -> list[tuple[str, list[Item]]]:
    """Groups items whose texts differ only in names, the largest group first.

    The text of a group has `...` in place of names that differ.
    """
    groups: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        groups[NAME.sub("...", text(item))].append(item)
    titled = [
        (text(members[0]) if len({text(member) for member in members}) == 1 else pattern, members)
        for pattern, members in groups.items()
    ]
    return sorted(titled, key=lambda group: -len(group[1]))
