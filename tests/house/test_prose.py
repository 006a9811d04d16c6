"""Docstrings and comments of the package are plain English: the worst turns of phrase do not come back."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

import pytest
from paths import ROOT

INSTEAD = {
    r"\b(those|that) of\b": "name the thing, or use a genitive: the sample's range",
    r"\balone\b": "only, or by itself",
    r"^(What|Whether|Of which)\b": "begin with a noun or a verb: Returns the ..., The ranges of ...",
    r"\berrs\b|\berr(ed)? by\b": "has an error of",
    r"\bin the place of\b": "instead of",
    r"\bas (it|they) came\b": "the original, unchanged",
}
"""Turns of phrase that a reader has to translate, and what to write instead."""


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Docstrings, texts below constants, and blocks of comments, each on one line, with its place."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.lineno, " ".join(str(node.value.value).split())
    block, end = "", 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] > end + 1:
                yield end, block.strip()
                block = ""
            block, end = f"{block} {token.string.lstrip('# ')}", token.start[0]
    yield end, block.strip()


def objections(source: str) -> list[str]:
    """Each turn of phrase that a source has, with its line and the advice."""
    return [
        f"{line}: {match[0]!r} in {text[:60]!r}: {advice}"
        for line, text in prose(source)
        for phrase, advice in INSTEAD.items()
        for match in re.finditer(phrase, text)
    ]


def test_docstrings_and_comments_are_plain_english() -> None:
    sources = sorted((ROOT / "rewriter").rglob("*.py"))
    assert [f"{p.relative_to(ROOT)}:{o}" for p in sources for o in objections(p.read_text("utf-8"))] == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('def f():\n    """What\n    is read."""', "'What'"),
        ("x = 1\n# Linux\n# alone\n", "'alone'"),
        ('Y = 2\n"""Largest one, in units of those\nof the engine."""', "'those of'"),
    ],
    ids=["a docstring", "a comment over two lines", "a text below a constant"],
)
def test_each_kind_of_text_is_read(source: str, found: str) -> None:
    (objection,) = objections(source)
    assert found in objection
    assert objections("alone = 'those of'  # a name and a string are no prose\n") == []
