"""Changes single places of our code and asks if a test notices: `python mutation.py --mutants 400`.

mutmut and cosmic-ray run every test that reaches a mutant, and most of ours reach much of the code. Here a
mutant meets the tests of its own file or room, in a copy of the repository. Which places are changed follows
from the seed. The exit code is 1 if fewer than `--least` of them were noticed.
"""

from __future__ import annotations

import argparse
import ast
import random
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ROOMS = ("passes", "hazards", "planning", "planning/costs", "verification")
TIME_LIMIT_S = 900

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


@dataclass(frozen=True)
class Mutant:
    """One changed place. `source` is the whole file with the change."""

    file: Path
    line: int
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
    what = _mutate(node)
    return Mutant(file, getattr(node, "lineno", 0), what, ast.unparse(tree))


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
    if isinstance(node, ast.If):
        was = ast.unparse(node.test)
        node.test = ast.UnaryOp(ast.Not(), node.test)
        return f"if {was} -> if not"
    if isinstance(node, ast.Constant):
        before = node.value
        if isinstance(before, (int, float)) and not isinstance(before, bool):
            node.value = before + 1
            return f"{before} -> {node.value}"
    return ""


def sampled(count: int, seed: int) -> list[Mutant]:
    """Mutants of files drawn at random, of each room in turn."""
    rooms = [[path.relative_to(ROOT) for path in (ROOT / "rewriter" / room).rglob("*.py")] for room in ROOMS]
    chosen = random.Random(seed)
    found: list[Mutant] = []
    while len(found) < count:
        mutant = mutant_of(chosen.choice(rooms[len(found) % len(rooms)]), chosen)
        found += [mutant] if mutant else []
    return found


def tests_of(file: Path) -> list[str]:
    """The tests of a pass, or those of the room, with the files that import the changed one first."""
    room = f"tests/{file.parts[1]}"
    named = sorted((ROOT / room).glob(f"test_{file.stem}*.py"))
    if file.parts[1] == "passes":
        return [str(path.relative_to(ROOT)) for path in named] or [room]
    module = ".".join(file.with_suffix("").parts)
    named += [path for path in sorted((ROOT / room).glob("test_*.py")) if module in path.read_text()]
    return [*dict.fromkeys(str(path.relative_to(ROOT)) for path in named), room]


def is_noticed(mutant: Mutant, folder: Path) -> bool:
    """True if a test fails, or hangs, with the mutant in place."""
    file = folder / mutant.file
    original = file.read_text()
    file.write_text(mutant.source)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests_of(mutant.file)]
    if mutant.file.parts[1] == "passes":
        command += [
            "tests/passes/test_every_pass.py",
            "-k",
            f"{mutant.file.stem.replace('_', '-')} or not every_pass",
        ]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, timeout=TIME_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return True
    finally:
        file.write_text(original)
    return done.returncode != 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutants", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--least", type=float, default=0.9, help="share that has to be noticed")
    request = parser.parse_args()
    survivors, drawn = [], sampled(request.mutants, request.seed)
    with tempfile.TemporaryDirectory(prefix="rewriter-mutants-") as temporary:
        folder = Path(temporary)
        for path in ROOT.iterdir():
            if path.name in ("rewriter", "tests"):
                shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
            elif not path.name.startswith("."):
                (folder / path.name).symlink_to(path)
        for number, mutant in enumerate(drawn, 1):
            noticed = is_noticed(mutant, folder)
            survivors += [] if noticed else [mutant]
            print(f"{number}/{len(drawn)} {'noticed' if noticed else 'SURVIVED'} {mutant}", flush=True)  # noqa: T201
    share = 1 - len(survivors) / len(drawn)
    print(f"{len(drawn) - len(survivors)} of {len(drawn)} noticed ({share:.0%})")  # noqa: T201
    return int(share < request.least)


if __name__ == "__main__":
    sys.exit(main())
