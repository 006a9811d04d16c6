"""`rewriter help`: a command's own --help; and every citation of docs/ in the package leads somewhere."""

import re
from collections.abc import Iterator

import pytest
from paths import DOCS, ROOT
from typer.testing import CliRunner

from rewriter.cli import app

CITED = re.compile(r"docs/(?!PAGE)([\w-]+\.md)(?:#([\w-]+))?")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


@pytest.mark.parametrize("words", [[], ["fix"], ["passes", "show"]], ids=" ".join)
def test_help_of_a_command_is_its_own(words: list[str]) -> None:
    shown, own = (CliRunner().invoke(app, line) for line in (["help", *words], [*words, "--help"]))
    assert shown.exit_code == own.exit_code == 0
    assert shown.output == own.output


def test_help_of_no_command_is_an_error() -> None:
    done = CliRunner().invoke(app, ["help", "fixx"])
    assert done.exit_code == 2 and "fixx" in done.output


def citations() -> Iterator[tuple[str, str]]:
    """Page and section of what docstrings, comments and messages of the package cite."""
    for path in sorted((ROOT / "rewriter").rglob("*.py")):
        yield from CITED.findall(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("page", "section"), sorted(set(citations())))
def test_what_the_package_cites_exists(page: str, section: str) -> None:
    headings = HEADING.findall((DOCS / page).read_text(encoding="utf-8"))
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    assert not section or section in slugs
