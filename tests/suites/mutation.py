"""Changes single places of our code and asks if a test notices: `python mutation.py --mutants 400`.

mutmut and cosmic-ray run every test that reaches a mutant, and most of ours reach much of the code. Here it
meets the fastest of them, `--seconds` in all, in a copy of the repository. One run of `--tests` with coverage
finds which tests reach a line. Which places are changed follows from the seed. The exit code is 1 if fewer
than `--least` of them were noticed.
"""

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reaching_tests import ReachingTests, measured

ROOT = Path(__file__).parents[2]
ROOMS = ("passes", "hazards", "hazards/planning", "target", "verification", "runtime/metrics")
TESTS = (
    *"passes hazards planning verification metrics pipeline rewriting patterns jobs".split(),
    "report/test_page.py",
    "report/test_report.py",
)
"""Folders and files of tests/ that mutants meet: those of the rooms, and others that reach them."""

SWAPPED: dict[type[ast.AST], type[Any]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
}
"""Operators with the one that takes their place."""

SMALL = range(10)
"""Numbers to count with: one more takes their place. Others are doubled: 2.2e8 and one more is the same."""


@dataclass(frozen=True)
class Mutant:
    """One changed place: `source` is the whole file with it, `places` the lines that show its effect."""

    file: Path
    line: int
    places: dict[str, Sequence[int]]
    what: str
    source: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}"


def mutant_of(file: Path, chosen: random.Random) -> Mutant | None:
    """One mutant of a file of the repository; None if nothing in it can be changed."""
    text = (ROOT / file).read_text()
    nodes = list(ast.walk(ast.parse(text)))  # all of them before one changes
    places = [place for place, node in enumerate(nodes) if _mutate(node)]
    if not places:
        return None
    tree = ast.parse(text)
    node = list(ast.walk(tree))[chosen.choice(places)]
    line = getattr(node, "lineno", 0)
    places_of_it = _places(file, tree, line)
    what = _mutate(node)
    return Mutant(file, line, places_of_it, what, ast.unparse(tree))


def _places(file: Path, tree: ast.Module, line: int) -> dict[str, Sequence[int]]:
    """A function's statement that has a line, without its body; of a constant, the lines that name it."""
    around = [
        n for n in ast.walk(tree) if isinstance(n, ast.stmt) and _first_line(n) <= line <= (n.end_lineno or 0)
    ]
    inner = around[-1]  # walked from the outside
    body = getattr(inner, "body", None)
    head = range(inner.lineno, max(line, body[0].lineno - 1 if body else inner.end_lineno or line) + 1)
    if any(isinstance(node, ast.FunctionDef) for node in around[:-1]):
        return {str(file): head}
    targets = inner.targets if isinstance(inner, ast.Assign) else [getattr(inner, "target", None)]
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    return _mentions(re.compile(rf"\b({'|'.join(names)})\b")) if names else {str(file): ()}


def _first_line(statement: ast.stmt) -> int:
    """A function and a class begin with their decorators."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])


def _mentions(name: re.Pattern[str]) -> dict[str, Sequence[int]]:
    """Lines of our code that hold a name, by file."""
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "rewriter").rglob("*.py")}
    lines = {
        file: [n for n, line in enumerate(text.splitlines(), 1) if name.search(line)]
        for file, text in texts.items()
    }
    return {file: found for file, found in lines.items() if found}


def _mutate(node: ast.AST) -> str:
    """Changes a node in place and says how; "" if there is nothing to change."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        was = ast.unparse(node)
        node.ops[0] = SWAPPED[type(node.ops[0])]()
        return f"{was} -> {ast.unparse(node)}"
    if isinstance(node, (ast.BoolOp, ast.BinOp)) and type(node.op) in SWAPPED:
        was = ast.unparse(node)
        node.op = SWAPPED[type(node.op)]()
        return f"{was} -> {ast.unparse(node)}"
    if isinstance(node, ast.If) and (was := ast.unparse(node.test)) != "TYPE_CHECKING":
        node.test = ast.UnaryOp(ast.Not(), node.test)
        return f"if {was} -> if not"
    if isinstance(node, ast.Constant):
        before = node.value
        if isinstance(before, (int, float)) and not isinstance(before, bool):
            node.value = before + 1 if before in SMALL else 2 * before
            return f"{before} -> {node.value}"
    return ""


def sampled(count: int, seed: int, names: Sequence[str] = ROOMS) -> list[Mutant]:
    """Mutants of files drawn at random, of each room in turn."""
    rooms = [sorted((ROOT / "rewriter" / name).rglob("*.py")) for name in names]
    chosen = random.Random(seed)
    found: list[Mutant] = []
    while len(found) < count:
        mutant = mutant_of(chosen.choice(rooms[len(found) % len(rooms)]).relative_to(ROOT), chosen)
        found += [mutant] if mutant else []
    return found


def is_noticed(mutant: Mutant, tests: list[str], folder: Path, limit_s: float) -> bool:
    """True if a test fails, or hangs, with the mutant in place."""
    file, named = folder / mutant.file, folder / "tests-of-mutant.txt"
    original = file.read_text()
    file.write_text(mutant.source)
    named.write_text("\n".join(tests))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"@{named}"]
    environment = os.environ | {"PYTHONPATH": str(folder)}  # children import the copy, too
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return True
    finally:
        file.write_text(original)
    return done.returncode != 0


def copied(folder: Path) -> Path:
    """A copy of our code and tests in a folder; whatever else the repository has is linked."""
    for path in ROOT.iterdir():
        if path.name in ("rewriter", "tests"):
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    return folder


def survivors_of(drawn: list[Mutant], reaching: ReachingTests, folder: Path, seconds: float) -> list[Mutant]:
    """Mutants that no test notices; each is printed as it is known."""
    survivors = []
    for number, mutant in enumerate(drawn, 1):
        tests = reaching.of(mutant.places, seconds)
        # what they took was measured with coverage; a busy machine and a cold start are allowed for
        limit_s = 60 + 10 * sum(reaching.seconds[test] for test in tests)
        noticed = bool(tests) and is_noticed(mutant, tests, folder, limit_s)
        survivors += [] if noticed else [mutant]
        outcome = "noticed" if noticed else f"SURVIVED {len(tests)} tests"
        print(f"{number}/{len(drawn)} {outcome} {mutant}", flush=True)  # noqa: T201
    return survivors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutants", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--least", type=float, default=0.85, help="share that has to be noticed")
    parser.add_argument("--seconds", type=float, default=30, help="of tests that a mutant meets at most")
    parser.add_argument("--rooms", nargs="*", default=ROOMS, help="folders of rewriter/")
    parser.add_argument("--tests", nargs="*", default=TESTS, help="folders of tests/")
    parser.add_argument(
        "--measured", type=Path, help="folder that keeps the run with coverage for the next time"
    )
    request = parser.parse_args()
    drawn = sampled(request.mutants, request.seed, request.rooms)
    with tempfile.TemporaryDirectory(prefix="rewriter-mutants-") as temporary:
        tests = [f"tests/{room}" for room in request.tests]
        reaching = measured(ROOT, tests, request.measured or Path(temporary) / "measured")
        survivors = survivors_of(drawn, reaching, copied(Path(temporary)), request.seconds)
    share = 1 - len(survivors) / len(drawn)
    print(f"{len(drawn) - len(survivors)} of {len(drawn)} noticed ({share:.0%})")  # noqa: T201
    return int(share < request.least)


if __name__ == "__main__":
    sys.exit(main())
