"""`rewriter help`: pages and sections of docs/, and every citation of one in the package."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from paths import DOCS, ROOT
from typer.testing import CliRunner

from rewriter.cli import app, handbook
from rewriter.errors import UsageError

CITED = re.compile(r"docs/(?!PAGE)[\w-]+\.md(?:#[\w-]+)?")


def citations() -> Iterator[str]:
    """What docstrings, comments and messages of the package cite."""
    for path in sorted((ROOT / "rewriter").rglob("*.py")):
        yield from CITED.findall(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("topic", sorted(set(citations())))
def test_what_the_package_cites_can_be_shown(topic: str) -> None:
    assert handbook.text_of(topic).startswith("#")


def test_all_pages_are_listed_with_their_titles() -> None:
    done = CliRunner().invoke(app, ["help"])
    assert done.exit_code == 0
    assert {line.split()[0] for line in done.output.splitlines()} == {path.stem for path in DOCS.glob("*.md")}
    assert "Troubleshooting by symptom" in done.output


def test_a_section_ends_where_the_next_one_begins() -> None:
    text = handbook.text_of("docs/plans.md#on-the-gpu")
    assert text.startswith("## On the GPU\n")
    assert "## TensorRT 8" not in text
    assert CliRunner().invoke(app, ["help", "plans#on-the-gpu"]).output == text


@pytest.mark.parametrize(
    ("topic", "hint"),
    [
        ("plan", "did you mean 'plans'"),
        ("plans#serching", "did you mean 'searching'"),
        ("zzz", "lists the pages"),
    ],
)
def test_a_page_that_does_not_exist_is_an_error_with_a_hint(topic: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        handbook.text_of(topic)
    assert hint in str(caught.value)
    assert CliRunner().invoke(app, ["help", topic]).exit_code == 2


@pytest.mark.parametrize("words", [["passes", "show", "rescale"], ["presets", "show", "trt-fp16"]])
def test_a_page_that_cites_docs_says_how_to_read_them(words: list[str]) -> None:
    output = CliRunner().invoke(app, words).output
    assert "docs/" in output
    assert "rewriter help docs/PAGE.md#SECTION" in output
