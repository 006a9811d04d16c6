"""Every citation of docs/ in the package leads somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from paths import DOCS, ROOT

CITED = re.compile(r"docs/(?!PAGE)([\w-]+\.md)(?:#([\w-]+))?")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def citations() -> Iterator[tuple[str, str]]:
    """Page and section of what docstrings, comments and messages of the package cite."""
    for path in sorted((ROOT / "rewriter").rglob("*.py")):
        yield from CITED.findall(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("page", "section"), sorted(set(citations())))
def test_what_the_package_cites_exists(page: str, section: str) -> None:
    headings = HEADING.findall((DOCS / page).read_text(encoding="utf-8"))
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    assert not section or section in slugs
