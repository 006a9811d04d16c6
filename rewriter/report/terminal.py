"""Shared parts of all reports on the terminal: console, tables, closing lines, and sentences made short."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Literal, TypeVar

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from rewriter.base import Target
from rewriter.data.source import DataSource
from rewriter.printable import printable

SHOWN = 5
"""Nodes, reasons and outputs listed of each kind without `-v`."""

MORE = "-v shows all"

NAME_WIDTH = 32
"""Holds two parts of a module path as a rule, enough to find the node in Netron."""

_LONG_NAME = re.compile(rf"[^\s,;()'\"]{{{NAME_WIDTH + 1},}}")
_NAME = re.compile(r"[^\s,;:()'\"]*[/_][^\s,;:()'\"]*")

Item = TypeVar("Item")


class _Console(Console):
    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Spells out control characters in names, and leaves rich's own in place."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))

    def on_broken_pipe(self) -> None:
        """Let the caller handle it: rich would exit with 1, which here means a failed verification."""
        raise BrokenPipeError


def console(stream: IO[str] | None = None, *, stderr: bool = False) -> Console:
    """Returns a console that prints names verbatim, without markup or highlighting.

    Characters that the terminal's encoding lacks are printed as `?`.
    """
    made = _Console(file=stream, stderr=stderr, markup=False, highlight=False, emoji=False)
    reconfigure = getattr(made.file, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
    return made


def new_table(
    title: str,
    *columns: str,
    rows: Iterable[Sequence[RenderableType]] = (),
    right: Iterable[str] = (),
    whole: str = "",
) -> Table:
    """Returns a table in the style of all reports.

    Args:
        right: Columns with numbers.
        whole: A column whose cells are not wrapped.
    """
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in columns:
        numeric = name in right
        justify: Literal["left", "right"] = "right" if numeric else "left"
        table.add_column(name, justify=justify, no_wrap=numeric or name == whole, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def print_report(
    sections: Callable[[int | None], Iterable[RenderableType]], verdict: Text, out: Console, verbosity: int
) -> None:
    """Print a report; verbosity -1: the verdict line only, 0: the highlights, 1: everything.

    Args:
        sections: Returns the parts before the verdict, with at most so many items of each kind.
    """
    if verbosity >= 0:
        for part in sections(None if verbosity > 0 else SHOWN):
            out.print(part)
    out.print(verdict, soft_wrap=True)  # one line, for grep


def about_target(target: Target) -> str:
    """One line: the target, and the origin of its probe results."""
    if not target.known_from:
        return f"Target: {target}; no probe results, rules assume the worst"
    return f"Target: {target}; probe results: {target.known_from}"


def closing_lines(
    data: DataSource | None, warnings: Iterable[str], seconds: Mapping[str, float]
) -> Iterator[Text]:
    """The data, the warnings that do not repeat it, and the time of each stage."""
    if data is not None:
        yield Text(f"Data: {data.text}", style="" if data.real else "yellow")
    for warning in warnings:
        if data is None or warning != data.text:
            yield Text(f"Warning: {warning}", style="yellow")
    yield Text("Time: " + ", ".join(f"{stage} {s:.1f} s" for stage, s in seconds.items()))


def shorten(text: str) -> str:
    """Returns the text with long names cut at the front: `/encoder/layer.0/attn/q` as `.../attn/q`."""
    return _LONG_NAME.sub(lambda match: _tail(match[0]), text)


def _tail(name: str) -> str:
    tail = name[-(NAME_WIDTH - 3) :]
    cut = tail.find("/")
    return "..." + (tail[cut:] if cut >= 0 and len(tail) - cut > 1 else tail)


def fitting(text: str, limit: int | None) -> str:
    """Returns the text, shortened unless everything is shown."""
    return text if limit is None else shorten(text)


def first_lines(lines: Sequence[str], limit: int | None) -> list[str]:
    """The first `limit` lines, shortened, and a note on the others."""
    if limit is None or len(lines) <= limit:
        return [fitting(line, limit) for line in lines]
    return [*map(shorten, lines[:limit]), f"... and {len(lines) - limit} more: {MORE}"]


def grouped(items: Iterable[Item], text: Callable[[Item], str]) -> list[tuple[str, list[Item]]]:
    """Groups items whose texts differ only in names, the largest group first.

    The text of a group has `...` in place of names that differ.
    """
    groups: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        groups[_NAME.sub("...", text(item))].append(item)
    found = []
    for pattern, members in groups.items():
        texts = {text(member) for member in members}
        found.append((texts.pop() if len(texts) == 1 else pattern, members))
    return sorted(found, key=lambda group: -len(group[1]))


def listed(names: Sequence[str], most: int | None) -> str:
    """The first `most` names, with commas, and the number of the others."""
    shown = names[:most]
    rest = len(names) - len(shown)
    return ", ".join(shown) + (f", ... and {rest} more" if rest else "")
