"""Shared parts of all reports on the terminal: console, summaries, tables, and names made short."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Literal, TypeVar

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from rewriter.ir.base import Target
from rewriter.ir.english import printable
from rewriter.pipeline.options import with_flags
from rewriter.runtime.inputs.samples import DataSource

MORE = "-v shows all"

NAME_WIDTH = 32
"""Holds two parts of a module path as a rule, enough to find the node in Netron."""

NAME = re.compile(r"[^\s,;:()'\"]*[/_][^\s,;:()'\"]*")
"""A name of a node or tensor in a sentence."""

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


Row = tuple[str, str]
"""A line of a summary: its label, or "" to go on under the last one, and its text."""


def print_report(
    verdict: Text,
    summary: Iterable[Row],
    details: Callable[[], Iterable[RenderableType]],
    out: Console,
    verbosity: int,
    commands: Iterable[Row] = (),
) -> None:
    """Print a report: the verdict first; verbosity -1: the verdict alone, 0: with its summary, 1: everything.

    Args:
        details: Returns the tables that follow with verbosity 1.
        commands: What to run next, each with its label, printed as one line, to be copied.
    """
    verdict.plain = with_flags(verdict.plain)
    out.print(verdict, soft_wrap=True)  # one line, for grep
    if verbosity < 0:
        return
    out.print(_summary(summary, out), soft_wrap=True)
    for label, command in commands:
        out.print(Text(f"{label:<{LABEL}}{command}"), soft_wrap=True)
    if verbosity > 0:
        out.print()
        for part in details():
            out.print(part)


LABEL = 9
"""Columns of the labels of a summary."""


def _summary(rows: Iterable[Row], out: Console) -> Text:
    """The rows, wrapped beside their labels, without the spaces that a table puts at the ends of lines."""
    lines, last = [], ""
    for label, text in rows:
        loud = label in ("Failed", "Limit") or text.startswith(("NaN", "NOT "))
        shown = Text("" if label == last else label, style="bold")
        wrapped = Text(with_flags(text), style="red" if loud else "").wrap(out, max(out.width - LABEL, 20))
        for part in wrapped:
            shown.align("left", LABEL)
            part.rstrip()
            lines.append(Text.assemble(shown, part))
            shown = Text()
        last = label or last
    return Text("\n").join(lines)


def first_rows(label: str, texts: Sequence[str], most: int | None) -> Iterator[Row]:
    """The first texts under one label, and the number of the others."""
    yield from ((label, text) for text in texts[:most])
    if most is not None and len(texts) > most:
        yield label, f"... and {len(texts) - most} more: {MORE}"


def about_target(target: Target) -> str:
    """One line: the target, and the origin of its probe results."""
    if not target.known_from:
        return f"Target: {target}; no probe results, rules assume the worst"
    return f"Target: {target}; probe results: {target.known_from}"


def time_line(seconds: Mapping[str, float]) -> Text:
    """The time of each stage."""
    return Text("Time: " + ", ".join(f"{stage} {s:.1f} s" for stage, s in seconds.items()))


def data_rows(data: DataSource, warnings: Iterable[str]) -> Iterator[Row]:
    """The data, and the warnings that do not repeat it."""
    yield "Data", data.text
    yield from (("Note", warning) for warning in warnings if warning != data.text)


def shortened(names: Iterable[str]) -> dict[str, str]:
    """Short forms of long names, cut at the front: `/encoder/layer.0/attn/q` as `.../attn/q`.

    Different names have different short forms: each is as long as it takes.
    """
    width, found = NAME_WIDTH, dict[str, str]()
    left = list(dict.fromkeys(names))
    while left:
        forms = {name: name if len(name) <= width else _tail(name, width) for name in left}
        taken = Counter((*forms.values(), *found.values()))
        found |= {name: form for name, form in forms.items() if taken[form] == 1 or form == name}
        left = [name for name in left if name not in found]
        width += NAME_WIDTH // 2
    return found


def _tail(name: str, width: int) -> str:
    tail = name[-(width - 3) :]
    cut = tail.find("/")
    return "..." + (tail[cut:] if cut >= 0 and len(tail) - cut > 1 else tail)


def grouped(items: Iterable[Item], text: Callable[[Item], str]) -> list[tuple[str, list[Item]]]:
    """Groups items whose texts differ only in names, the largest group first.

    The text of a group has `...` in place of names that differ.
    """
    groups: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        groups[NAME.sub("...", text(item))].append(item)
    found = []
    for pattern, members in groups.items():
        texts = {text(member) for member in members}
        found.append((texts.pop() if len(texts) == 1 else pattern, members))
    return sorted(found, key=lambda group: -len(group[1]))


def listed(names: Sequence[str], most: int | None = None) -> str:
    """The first `most` names in short forms, with commas, and the number of the others; or all in full."""
    shown = names if most is None else list(shortened(names[:most]).values())
    rest = len(names) - len(shown)
    return ", ".join(shown) + (f", ... and {rest} more" if rest > 0 else "")
