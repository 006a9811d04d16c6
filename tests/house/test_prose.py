"""Texts are plain English: the worst turns of phrase do not come back, and pages have short sentences."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_pages import PAGES
from paths import DOCS, ROOT
from tables import values

INSTEAD = {
    r"\b([Tt]hose|[Tt]hat) of\b": "name the thing, or use a genitive: the sample's range",
    r"\balone\b": "only, or by itself",
    r"^(What|Whether|Of which)\b(?!.*\?$)": "begin with a noun or a verb: Returns the ..., The ranges of ...",
    r"\berrs\b|\berr(ed)? by\b": "has an error of",
    r"\bin the place of\b": "instead of",
    r"\bas (it|they) came\b": "the original, unchanged",
}
"""Turns of phrase that a reader has to translate, and what to write instead."""

FOR_USERS = INSTEAD | {
    r"\bof which\b": "a sentence of its own",
    r"\bat once\b": "immediately, or at the same time",
    r"\b[Nn]obody\b": "say who, or use the passive",
    r"\b[Ii]n place of\b": "instead of",
    r"\bhas no say\b": "is ignored",
    r"\ball the same\b": "still",
}
"""The same for texts that users read: pages, messages, and help."""

LONGEST = 25  # words of a sentence on a page: one of as many is too long

MOST_COMPOSED = {"jobs": 765, "verification": 470}
"""Most words of sentences that these rooms compose, apart from errors: they hand values to report/, which has
the sentences. Lower a number with each text that moves up."""

MOST_WORDS = 20_700  # words of the pages that are written by hand

GENERATED = {"endings.md", "findings.md", "trt11-migration.md", "configuration.md"}
"""Pages that are made, in whole or in part: their sentences come from the code."""

MARKED = r"<!--.*?-->|^ *```.*?^ *```"
CELL = re.compile(r"(?<!\\)\|")
ITEM = re.compile(r"(?:[-*>]|\d+\.) ")
END = re.compile(r"(?<=[.!?:;]) (?=[A-Z*(“])|(?<=[.?!]) ")


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


def messages(source: str) -> Iterator[tuple[int, str]]:
    """Strings of several words that are no docstrings: what a program prints. An f-string is one text."""
    tree = ast.parse(source)
    skipped = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in node.values}
            text = "".join(str(p.value) if isinstance(p, ast.Constant) else "{}" for p in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            text = node.value
        else:
            continue
        if text.count(" ") > 1:
            yield node.lineno, " ".join(text.split())


def paragraphs(page: str) -> Iterator[str]:
    """The paragraphs, items, headings and cells of a page, without code and links."""
    page = re.sub(MARKED, "\n\n", page, flags=re.MULTILINE | re.DOTALL)
    page = re.sub(r"`[^`]*`", "CODE", re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", page))
    block = ""
    for line in [*map(str.strip, page.splitlines()), ""]:
        alone = not line or line[0] in "#|"
        if block and (alone or ITEM.match(line)):
            yield block
            block = ""
        if alone:
            yield from filter(None, map(str.strip, CELL.split(line)))
        else:
            item = ITEM.match(line)
            block = f"{block} {line[item.end() if item else 0 :]}".strip()


def objections(texts: Iterator[tuple[int, str]], phrases: dict[str, str] = INSTEAD) -> list[str]:
    """Each turn of phrase that texts have, with its line and the advice."""
    return [
        f"{line}: {match[0]!r} in {text[:60]!r}: {advice}"
        for line, text in texts
        for phrase, advice in phrases.items()
        for match in re.finditer(phrase, text)
    ]


def every_source() -> list[Path]:
    """Modules of the package."""
    return sorted((ROOT / "rewriter").rglob("*.py"))


def test_docstrings_and_comments_are_plain_english() -> None:
    found = {path: objections(prose(path.read_text("utf-8"))) for path in every_source()}
    assert [f"{path.relative_to(ROOT)}:{o}" for path, all_of in found.items() for o in all_of] == []


def test_messages_are_plain_english() -> None:
    found = {path: objections(messages(path.read_text("utf-8")), FOR_USERS) for path in every_source()}
    assert [f"{path.relative_to(ROOT)}:{o}" for path, all_of in found.items() for o in all_of] == []


@pytest.mark.parametrize("room", MOST_COMPOSED)
def test_sentences_are_composed_in_report(room: str) -> None:
    words = 0
    for source in (path.read_text("utf-8") for path in sorted((ROOT / "rewriter" / room).rglob("*.py"))):
        raised = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Raise)]
        errors = {line for node in raised for line in range(node.lineno, (node.end_lineno or 0) + 1)}
        words += sum(len(text.split()) for line, text in messages(source) if line not in errors)
    assert words <= MOST_COMPOSED[room], "hand over a value, and compose the sentence in report/"


@pytest.mark.parametrize("ending", ["*.toml", "*.html"])
def test_tables_and_templates_are_plain_english(ending: str) -> None:
    paths = sorted((ROOT / "rewriter").rglob(ending))
    assert paths
    for path in paths:
        lines = path.read_text("utf-8").splitlines()
        shown = ((at, line) for at, line in enumerate(lines, 1) if not line.lstrip().startswith("#"))
        assert objections(shown, FOR_USERS) == [], path


@pytest.mark.parametrize("path", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda path: path.name)
def test_pages_are_plain_english(path: Path) -> None:
    assert objections(((0, text) for text in paragraphs(path.read_text("utf-8"))), FOR_USERS) == []


@pytest.mark.parametrize("path", [p for p in PAGES if p.name not in GENERATED], ids=lambda path: path.name)
def test_sentences_of_pages_are_short(path: Path) -> None:
    sentences = [s for text in paragraphs(path.read_text("utf-8")) for s in END.split(text)]
    assert [s for s in sentences if len(s.replace("CODE", "").split()) >= LONGEST] == []


def test_the_pages_are_read_in_an_afternoon() -> None:
    pages = [path for path in DOCS.glob("*.md") if path.name not in GENERATED]
    words = [word for path in pages for word in path.read_text("utf-8").split() if re.search(r"\w", word)]
    assert len(words) <= MOST_WORDS


@values
def test_each_kind_of_text_is_read(source: str, found: str) -> None:
    (objection,) = objections(prose(source))
    assert found in objection
    assert objections(prose("alone = 'those of'  # a name and a string are no prose\n")) == []
