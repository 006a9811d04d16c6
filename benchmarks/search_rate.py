"""How many plans `fix --search gpu` evaluates a minute: on a GPU.

    python benchmarks/search_rate.py SECONDS MODEL.onnx ... [--json FILE]

The samples of MODEL.onnx are in the folder MODEL/. A plan counts if it was built, run and timed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # an older version may stand before it

import rewriter


def rate(model: Path, seconds: float) -> dict[str, float | int | str]:
    """Plans that were measured, and the seconds of the search and of `fix` as a whole."""
    start = time.perf_counter()
    result = rewriter.fix(
        str(model),
        inputs=str(model.with_suffix("")),
        target="tensorrt-rtx",
        verify=False,
        search="gpu",
        search_seconds=seconds,
    )
    assert result.searched is not None
    plans = sum(one.latency_us is not None for one in result.searched.tried)
    spent = result.seconds["search"]
    return {
        "model": model.stem,
        "plans": plans,
        "search_s": round(spent, 1),
        "plans_a_minute": round(60 * plans / spent, 1),
        "fix_s": round(time.perf_counter() - start, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("seconds", type=float, help="--search-seconds")
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for model in arguments.models:
        rows.append(rate(model, arguments.seconds))
        print(json.dumps(rows[-1]), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
