"""README.md and docs/ as data: their blocks, commands, links, and what they say about running them."""

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from paths import DOCS, ROOT

PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]

ELSEWHERE = {
    "docs/batch.md": "tests/house/test_batch_page.py checks the page",
    "docs/hooks.md": "tests/hooks/test_hooks_page.py runs the page",
    "docs/library.md": "tests/jobs/test_library.py runs the page",
}
"""Pages, if there are such, that need more than the common files: their commands are parsed here."""

_BLOCK = re.compile(
    r"(?:^ *<!-- (?P<mark>.*?) -->\n)?^(?P<indent> *)```(?P<language>\w*)\n(?P<body>.*?)^(?P=indent)```",
    re.MULTILINE | re.DOTALL,
)
_COMMAND = re.compile(r"^ *(?P<line>rewriter .*)$", re.MULTILINE)
_REASON = re.compile(r"not run: (?P<reason>.*)|(?P<gpu>needs a GPU)")
LINK = re.compile(r"\]\(([^)#:\s]*)(#[^)\s]*)?\)")


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, language, text without indentation, and the comment before it."""

    page: str
    language: str
    body: str
    mark: str

    @property
    def not_run(self) -> str:
        """The reason for which it does not run here; empty if it does."""
        return reason_in(self.mark)

    def __str__(self) -> str:
        return f"{self.page}: {self.body.splitlines()[0]}"


@dataclass(frozen=True)
class CommandLine:
    """A line of a page that begins with `rewriter`."""

    page: str
    line: str
    not_run: str

    @property
    def words(self) -> list[str]:
        """Its words behind `rewriter`, without comment."""
        return shlex.split(self.line, comments=True)[1:]

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)}"


def reason_in(text: str) -> str:
    """Why a command or block is not run here, as a comment says it; empty without one."""
    found = _REASON.search(text)
    return (found["reason"] or found["gpu"]) if found else ""


def blocks() -> Iterator[Block]:
    """All fenced blocks of all pages."""
    for path in PAGES:
        for found in _BLOCK.finditer(path.read_text(encoding="utf-8")):
            body = textwrap.dedent(found["body"])
            yield Block(path.relative_to(ROOT).as_posix(), found["language"], body, found["mark"] or "")


def command_lines() -> Iterator[CommandLine]:
    """All commands of all pages, each once: fenced, and indented in generated pages."""
    seen = set()
    for path in PAGES:
        page, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        marked = [(b.span(), reason_in(b["mark"] or "")) for b in _BLOCK.finditer(text)]
        for found in _COMMAND.finditer(text):
            line = found["line"]
            outer = next((why for (start, end), why in marked if start < found.start() < end), "")
            why = ELSEWHERE.get(page) or outer or reason_in(line.partition("#")[2])
            command = CommandLine(page, line, why)
            if tuple(command.words) not in seen:
                seen.add(tuple(command.words))
                yield command
