"""Results in a few lines: as text at a Python prompt, and as a small table in a notebook."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from html import escape
from itertools import islice

from rewriter.ir.english import printable

MOST_ROWS = 12
"""Rows of a summary: what a result holds beyond them is in its attributes and in the report."""

WIDTH = 160
"""Characters of a row's text."""

Row = tuple[str, str]


class Summary:
    """A data class that shows itself in a few lines; it needs `@dataclass(repr=False)`."""

    @abstractmethod
    def summary(self) -> Iterable[Row]:
        """Rows of a title and a text. The first one has the verdict."""

    def __repr__(self) -> str:
        rows = list(self._rows())
        width = max((len(title) for title, _ in rows), default=0)
        lines = [f"  {title:<{width}}  {text}" for title, text in rows]
        return "\n".join([type(self).__name__, *lines])

    def _repr_html_(self) -> str:
        """The summary as a table, for notebooks; names of users' files cannot become markup."""
        style = "text-align: left; vertical-align: top"
        rows = "".join(
            f'<tr><th style="{style}">{escape(title)}</th><td style="{style}">{escape(text)}</td></tr>'
            for title, text in self._rows()
        )
        return f"<table><caption>{escape(type(self).__name__)}</caption>{rows}</table>"

    def _rows(self) -> Iterable[Row]:
        for title, text in islice(self.summary(), MOST_ROWS):
            plain = printable(" ".join(text.split()))
            yield title, plain if len(plain) <= WIDTH else f"{plain[: WIDTH - 3]}..."


def listed(title: str, texts: Iterable[str], most: int = 4) -> Iterable[Row]:
    """A row for each text, under one title; the last row counts those left out."""
    found = list(texts)
    for index, text in enumerate(found[:most]):
        yield title if index == 0 else "", text
    if len(found) > most:
        yield "", f"and {len(found) - most} more"
