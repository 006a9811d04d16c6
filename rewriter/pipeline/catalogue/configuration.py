"""The table of configuration keys in docs/configuration.md."""

from __future__ import annotations

from rewriter.pipeline.options import KEYS, readers
from rewriter.pipeline.presets import OTHERWISE
from rewriter.pipeline.reader import expected, to_text
from rewriter.pipeline.schema import Option

BEGIN, END = "<!-- keys: written by `python -m rewriter.pipeline.catalogue` -->\n", "<!-- end of keys -->\n"


def with_table(page: str) -> str:
    """The page with a fresh table between its two marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"docs/configuration.md lacks {BEGIN.strip()} or {END.strip()}")
    return before + BEGIN + table() + END + after


def table() -> str:
    """A row for every key: its type, its default, the commands that read it, and what it does."""
    head = ["| key | it takes | default | read by | what it is |", "|---|---|---|---|---|"]
    return "\n".join([*head, *map(_row, KEYS.values())]) + "\n"


def _row(key: Option) -> str:
    default = key.default if key.default is not None else OTHERWISE.get(key.name)
    shown = "none" if default in (None, (), {}) else f"`{to_text(default)}`"
    cells = (f"`{key.key}`", expected(key.kind), shown, ", ".join(readers(key.name)), key.text)
    return f"| {' | '.join(cells)} |"
