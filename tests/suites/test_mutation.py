"""Which lines show the effect of a changed place, and what is changed."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import mutation
import pytest

FILE = Path("rewriter/passes/any.py")

CODE = """\
from functools import lru_cache

@lru_cache(maxsize=100)
def one(x: int = 7) -> int:
    if (x > 3
            and x < 5):
        return x
    return x + 1
"""


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        pytest.param(3, (), id="a decorator runs at import"),
        pytest.param(4, (), id="a default, too"),
        pytest.param(5, (5, 6), id="a condition, without the body"),
        pytest.param(6, (5, 6), id="its second line"),
        pytest.param(8, (8,), id="a statement"),
    ],
)
def test_the_lines_of_a_place(line: int, lines: tuple[int, ...]) -> None:
    places = mutation._places(FILE, ast.parse(CODE), line)
    assert {file: tuple(found) for file, found in places.items()} == {str(FILE): lines}


def test_a_constant_shows_where_it_is_named() -> None:
    places = mutation._places(FILE, ast.parse("LEAST_BIAS = 2.0"), 1)
    assert {Path(file).name for file in places} >= {"rounded_reciprocals.py"}
    assert all(lines for lines in places.values())


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        pytest.param("a < b", "a <= b", id="a comparison"),
        pytest.param("a is None", "a is not None", id="identity"),
        pytest.param("a and b", "a or b", id="a Boolean"),
        pytest.param("a + b", "a - b", id="arithmetic"),
        pytest.param("9", "10", id="a number to count with"),
        pytest.param("2.2e8", "440000000.0", id="another number"),
    ],
)
def test_what_is_changed(text: str, changed: str) -> None:
    node = ast.parse(text, mode="eval").body
    assert mutation._mutate(node)
    assert ast.unparse(node) == changed


@pytest.mark.parametrize("text", ["True", "'text'", "a % b", "f(a)", "not a"])
def test_what_is_left(text: str) -> None:
    node = ast.parse(text, mode="eval").body
    assert mutation._mutate(node) == ""


def test_one_seed_draws_one_sample_of_all_rooms_in_turn() -> None:
    once, again = (mutation.sampled(6, 3) for _ in range(2))
    assert [str(mutant) for mutant in once] == [str(mutant) for mutant in again]
    for mutant, room in zip(once, mutation.ROOMS, strict=True):
        assert str(mutant.file).startswith(f"rewriter/{room}/")
        assert mutant.source != (mutation.ROOT / mutant.file).read_text()
    assert [str(one) for one in mutation.sampled(6, 4)] != [str(one) for one in once]


def test_a_file_without_a_place_has_no_mutant() -> None:
    assert mutation.mutant_of(Path("rewriter/runtime/figures/__init__.py"), random.Random(0)) is None
