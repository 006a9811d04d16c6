"""Results in a few lines, at a Python prompt and in a notebook."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from itertools import islice

from rewriter.base.text import one_line

MOST_ROWS = 12
"""Rows of a summary: what a result holds beyond them is in its attributes and in the report."""

WIDTH = 160  # characters of a row's text

Row = tuple[str, str]


class Summary:
    """A data class that shows itself in a few lines; it needs `@dataclass(repr=False)`."""

    @abstractmethod
    def summary(self) -> Iterable[Row]:
        """Rows of a title and a text. The first one has the verdict."""

    def __repr__(self) -> str:
        rows = []
        for title, text in islice(self.summary(), MOST_ROWS):
            plain = one_line(text)
            rows.append((one_line(title), plain if len(plain) <= WIDTH else f"{plain[: WIDTH - 3]}..."))
        width = max((len(title) for title, _ in rows), default=0)
        return "\n".join([type(self).__name__, *(f"  {title:<{width}}  {text}" for title, text in rows)])


def listed(title: str, texts: Iterable[str], most: int = 4) -> Iterable[Row]:
    """A row for each text, under one title; the last row counts those left out."""
    items = list(texts)
    yield from ((title if index == 0 else "", text) for index, text in enumerate(items[:most]))
    if len(items) > most:
        yield "", f"and {len(items) - most} more"
