"""Fails if tests ran too little of our code: `python coverage_floor.py build/coverage.json`.

`--cov-fail-under` holds the sum of lines and branches alone. The file is what `--cov-report=json` writes.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LEAST = {"lines": 95.0, "branches": 90.0}  # percent of each that a run of all tests has to reach

NAMED = 10  # files that a complaint names: those where most is left

COUNTS = {"lines": ("num_statements", "missing_lines"), "branches": ("num_branches", "missing_branches")}
"""Keys of coverage's summaries: how many there are, and how many did not run."""


def share(summary: Mapping[str, float], kind: str) -> float:
    """Percent of lines or branches that ran; 100 where there are none."""
    number, missing = (summary[key] for key in COUNTS[kind])
    return 100.0 * (number - missing) / number if number else 100.0


def complaints(report: Mapping[str, Any]) -> list[str]:
    """A paragraph for each share that is too small, with the files where most is left."""
    found = []
    for kind, least in LEAST.items():
        if share(report["totals"], kind) < least:
            files = {name: file["summary"] for name, file in report["files"].items()}
            worst = sorted(files, key=lambda name: -files[name][COUNTS[kind][1]])[:NAMED]
            named = [f"  {name}: {_left(files[name], kind)}" for name in worst]
            found.append(
                "\n".join([f"{_left(report['totals'], kind)}; at least {least:g} % have to", *named])
            )
    return found


def _left(summary: Mapping[str, float], kind: str) -> str:
    number, missing = (summary[key] for key in COUNTS[kind])
    # rounded down, so that 94.99 % does not read as the 95 % that it misses
    percent = int(10 * share(summary, kind)) / 10
    return f"{percent} % of {kind} ran ({missing:.0f} of {number:.0f} did not)"


def main(path: str) -> int:
    report = json.loads(Path(path).read_text(encoding="utf-8"))
    found = complaints(report)
    print("\n".join(found or [f"coverage: {_left(report['totals'], kind)}" for kind in LEAST]))  # noqa: T201
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
