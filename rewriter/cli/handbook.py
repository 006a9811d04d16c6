"""The pages of docs/, which messages and docstrings cite as docs/PAGE.md#SECTION.

A wheel installs them under share/doc/rewriter.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import rewriter
from rewriter.errors import UsageError, did_you_mean

HOME = Path("share", "doc", "rewriter")
"""Of the pages below an installation's prefix; pyproject.toml's data-files have it, too."""

_HEADING = re.compile(r"^(#+) (.*)$")


def pages() -> dict[str, Path]:
    """The pages by topic: the name of the file without its ending.

    Raises:
        UsageError: this installation has none.
    """
    for folder in _folders():
        found = {path.stem: path for path in sorted(folder.glob("*.md"))}
        if found:
            return found
    raise UsageError(
        "the pages of docs/ are not installed",
        hint="install rewriter from its wheel, or read them in a checkout",
    )


def title(path: Path) -> str:
    """The first heading of a page."""
    return path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def text_of(topic: str) -> str:
    """A page or one of its sections, as Markdown.

    Args:
        topic: `plans`, `plans#searching` or `docs/plans.md#searching`.

    Raises:
        UsageError: no such page or section.
    """
    name, _, section = topic.removeprefix("docs/").partition("#")
    known = pages()
    name = name.removesuffix(".md")
    if name not in known:
        raise UsageError(
            f"no page {name!r}", hint=did_you_mean(name, known) or "`rewriter help` lists the pages"
        )
    text = known[name].read_text(encoding="utf-8")
    return _section(text, section, name) if section else text


def slug(heading: str) -> str:
    """The fragment that code hosts and the site give a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def _folders() -> Iterator[Path]:
    """Where the pages may be: in a checkout, below the prefixes, or beside the package (`pip --target`)."""
    above = Path(rewriter.__file__).resolve().parents[1]
    if (above / "mkdocs.yml").is_file():
        yield above / "docs"
    for scheme in (sysconfig.get_default_scheme(), sysconfig.get_preferred_scheme("user")):
        yield Path(sysconfig.get_path("data", scheme)) / HOME
    yield above / HOME


def _section(text: str, wanted: str, name: str) -> str:
    """From the heading `wanted` to the next one of its level or above."""
    lines, fenced, start, level = text.splitlines(), False, None, 0
    slugs = []
    for place, line in enumerate(lines):
        fenced ^= line.lstrip().startswith("```")
        heading = None if fenced else _HEADING.match(line)
        if heading is None:
            continue
        if start is not None and len(heading[1]) <= level:
            return "\n".join(lines[start:place]).rstrip() + "\n"
        slugs.append(slug(heading[2]))
        if start is None and slugs[-1] == wanted:
            start, level = place, len(heading[1])
    if start is None:
        hint = did_you_mean(wanted, slugs) or f"`rewriter help {name}` shows the page"
        raise UsageError(f"page {name!r} has no section {wanted!r}", hint=hint)
    return "\n".join(lines[start:]).rstrip() + "\n"
