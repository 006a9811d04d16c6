"""Fails if tests ran too little of our code: `python coverage_floor.py build/coverage.json`.

`--cov-fail-under` holds only the sum of lines and branches. The file is what `--cov-report=json` writes.
"""

import json
import sys
from pathlib import Path

LEAST = (("num_statements", "missing_lines", 95.0), ("num_branches", "missing_branches", 90.0))
"""Keys of coverage's summaries, and the percentage that a run of all tests has to reach."""

NAMED = 10  # files that are printed: those where most is left


def main(path: str) -> int:
    report = json.loads(Path(path).read_text(encoding="utf-8"))
    total, failed = report["totals"], False
    for number, missing, least in LEAST:
        share = 100.0 * (1.0 - total[missing] / total[number])
        failed = failed or share < least
        print(f"{number} {total[number]}, {missing} {total[missing]}: {share:.2f} %, at least {least:g} %")  # noqa: T201
        if share < least:
            left = {name: file["summary"][missing] for name, file in report["files"].items()}
            worst = sorted(left, key=left.__getitem__)[-NAMED:]
            print("\n".join(f"  {name}: {left[name]}" for name in worst))  # noqa: T201
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
