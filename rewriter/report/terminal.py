"""Shared parts of all reports on the terminal: console, summaries, tables, and names made short."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from rewriter.base.text import Row, one_line, rows_of
from rewriter.pipeline.options import with_flags
from rewriter.report.tables import State, Table
from rewriter.runtime.inputs.samples import DataSource
from rewriter.target import Target

MORE = "-v shows all"
NOT_PROBED = "no probe results, rules assume the worst"

NAME_WIDTH = 32  # holds two parts of a module path as a rule, enough to find the node in Netron


class _Console(Console):
    def print(self, *objects: Any, **more: Any) -> None:
        """Prints each text on one line, whatever a file wrote into it."""
        for shown in objects:
            if isinstance(shown, Text):
                shown.plain = one_line(shown.plain)
        super().print(*(one_line(shown) if isinstance(shown, str) else shown for shown in objects), **more)


def console(stream: IO[str] | None = None, *, stderr: bool = False) -> Console:
    """Returns a console that prints names verbatim, without markup or highlighting.

    Characters that the terminal's encoding lacks are printed as `?`.
    """
    out = _Console(file=stream, stderr=stderr, markup=False, highlight=False, emoji=False)
    reconfigure = getattr(out.file, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
    return out


def print_report(
    verdict: str,
    state: State,
    summary: Iterable[Row],
    tables: Iterable[Table],
    out: Console,
    verbosity: int,
    commands: Iterable[Row] = (),
    facts: Iterable[Row] = (),
) -> None:
    """Print a report, the verdict first; verbosity -1: only the verdict, 0: with its summary, 1: everything.

    `commands` are to be copied, each on one line, but for empty ones; `facts` follow the tables.
    """
    out.print(Text(with_flags(verdict), STYLES[state]), soft_wrap=True)  # one line, for grep
    if verbosity < 0:
        return
    print_rows(summary, out)
    for label, command in filter(all, commands):
        out.print(Text(f"{label:<{LABEL}}{command}"), soft_wrap=True)
    if verbosity > 0:
        for table in tables:
            if table.rows:
                out.print("")
                _print_table(table, out)
        out.print("", *(Text(": ".join(fact)) for fact in facts), sep="\n")


def print_rows(rows: Iterable[Row], out: Console) -> None:
    """Print lines of a summary, each beside its label."""
    out.print(*_summary(rows, out), sep="\n", soft_wrap=True)


def _print_table(table: Table, out: Console) -> None:
    """Prints a table, and below each row the names that a page lists on demand, whole, a line for each."""
    blocks = [Table(table.columns, [row], title=table.title) for row in table.rows]
    if not any(cell.names for row in table.rows for cell in row):
        blocks = [table]
    widths = {
        column: max(len(name), *(len(row[column].text) for row in table.rows))
        for column, (name, kind) in enumerate(table.columns.items())
        if kind in ("number", "choice")
    }
    for index, block in enumerate(blocks):
        out.print(printed(block, head=not index, widths=widths if len(blocks) > 1 else {}))
        names = [name for cell in block.rows[-1] for name in cell.names] if block is not table else []
        for name in names:
            out.print(Text(f"    {name}"), soft_wrap=True)


def printed(table: Table, *, head: bool = True, widths: Mapping[int, int] | None = None) -> RichTable:
    """A table as text, without the names that a page lists on demand; `widths` of columns by index."""
    title = table.title if head else None
    shown = RichTable(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    shown.show_header = head
    for column, (name, kind) in enumerate(table.columns.items()):
        justify: Literal["left", "right"] = "right" if kind == "number" else "left"
        fixed = kind in ("number", "choice")
        width = (widths or {}).get(column)
        shown.add_column(name, justify=justify, no_wrap=fixed, overflow="fold", width=width)
    for row in table.rows:
        texts = [cell.text + ":" * bool(cell.names) for cell in row]
        shown.add_row(*(Text(one_line(t), STYLES[cell.state]) for t, cell in zip(texts, row, strict=True)))
    return shown


STYLES: Mapping[State, str] = {"good": "green", "warn": "yellow", "bad": "bold red", "plain": ""}
"""Styles of a verdict or a cell, by its state."""

LABEL = 9  # columns of the labels of a summary


def _summary(rows: Iterable[Row], out: Console) -> list[Text]:
    """The rows, wrapped beside their labels, without the spaces that a table puts at the ends of lines."""
    lines, last = list[Text](), ""
    for label, text in rows:
        loud = label in ("Failed", "Limit")
        shown = Text("" if label == last else label, style="bold")
        plain = Text(one_line(with_flags(text)), style="red" if loud else "")
        wrapped = plain.wrap(out, max(out.width - LABEL, 20))
        for part in wrapped:
            shown.align("left", LABEL)
            part.rstrip()
            lines.append(Text.assemble(shown, part))
            shown = Text()
        last = label or last
    return lines


first_rows = partial(rows_of, rest=f": {MORE}")


def facts(target: Target | None, seconds: Mapping[str, float] | None) -> Iterator[Row]:
    """The target with the origin of its probe results, and the time of each stage."""
    if target is not None:
        probed = f"probe results: {target.known_from}" if target.known_from else NOT_PROBED
        yield "Target", f"{target}; {probed}"
    if seconds:
        yield "Time", ", ".join(f"{stage} {s:.1f} s" for stage, s in seconds.items())


def last_rows(
    data: DataSource | None, notes: Iterable[str], seconds: Mapping[str, float], most: int | None = None
) -> Iterator[Row]:
    """The data, the first notes that do not repeat it, and the time."""
    if data is not None:
        yield "Data", data.text
    yield from first_rows("Note", (n for n in notes if data is None or n != data.text), most)
    yield "Time", f"{sum(seconds.values()):.0f} s"


def data_words(data: DataSource | None) -> list[object]:
    """The options that give a command the same samples again."""
    if data is None:
        return []
    words: list[object] = ["--inputs", Path(data.path or "YOUR_DATA.npz")] if data.real else []
    words += ["--image-preprocess", data.preprocess] if data.preprocess else []
    return [*words, *(word for key, text in data.options.items() for word in (f"--{key}", text))]


def shortened(names: Iterable[str]) -> dict[str, str]:
    """Short forms of long names, cut at the front: `/encoder/layer.0/attn/q` as `.../attn/q`.

    Names that would have one form stay whole.
    """
    forms = {name: name for name in names}
    for name in (name for name in forms if len(name) > NAME_WIDTH):
        tail = name[-(NAME_WIDTH - 3) :]
        forms[name] = "..." + (tail[max(tail.find("/"), 0) :] if tail.find("/") < len(tail) - 1 else tail)
    taken = Counter(forms.values())
    return {name: form if taken[form] == 1 else name for name, form in forms.items()}


def listed(names: Sequence[str], most: int | None = None) -> str:
    """The first `most` names in short forms, with commas, and the number of the others; or all in full."""
    shown = names if most is None else list(shortened(names[:most]).values())
    rest = len(names) - len(shown)
    return ", ".join(shown) + (f", ... and {rest} more" if rest > 0 else "")
