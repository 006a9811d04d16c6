"""Tables in the style of all reports."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table


def new_table(title: str, *columns: str, right: Iterable[str] = ()) -> Table:
    """A table in the style of all reports; the columns named in `right` hold numbers."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 1)
    )
    for name in columns:
        numeric = name in right
        table.add_column(name, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    return table
