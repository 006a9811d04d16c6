"""`make test` fails where tests run too few lines or too few branches, each judged on its own."""

import pytest
from coverage_floor import LEAST, complaints
from paths import ROOT

Counts = tuple[int, int, int, int]
"""Lines, lines that did not run, branches, branches that did not run."""

KEYS = ("num_statements", "missing_lines", "num_branches", "missing_branches")


def report(*files: Counts) -> dict[str, object]:
    total = dict(zip(KEYS, map(sum, zip(*files, strict=True)), strict=True))
    return {
        "totals": total,
        "files": {
            f"rewriter/{number}.py": {"summary": dict(zip(KEYS, counts, strict=True))}
            for number, counts in enumerate(files)
        },
    }


TABLE = [
    pytest.param((1000, 50, 1000, 100), [], id="both at the floor"),
    pytest.param(
        (1000, 51, 1000, 0), ["94.9 % of lines ran (51 of 1000 did not)"], id="lines, branches make up"
    ),
    pytest.param((1000, 0, 1000, 101), ["89.9 % of branches ran (101 of 1000 did not)"], id="branches alone"),
    pytest.param((1000, 0, 0, 0), [], id="no branch"),
    pytest.param((100000, 5001, 10, 0), ["94.9 % of lines"], id="not rounded up to the floor"),
]


@pytest.mark.parametrize(("counts", "begins"), TABLE)
def test_each_share_is_judged_on_its_own(counts: Counts, begins: list[str]) -> None:
    found = complaints(report(counts))
    assert len(found) == len(begins)
    assert all(text.startswith(begin) for text, begin in zip(found, begins, strict=True))


def test_make_nightly_holds_the_floor() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert (
        "coverage_floor.py build/coverage.json" in makefile.partition("\ncoverage: ")[2].partition("\n\n")[0]
    )
    assert LEAST == {"lines": 95.0, "branches": 90.0}
