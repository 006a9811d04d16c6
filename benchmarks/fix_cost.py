"""Cost of `rewriter fix` as a whole process: seconds and peak memory, against AutoCast's measured figures.

    python models/build.py rtdetr esrgan whisper_encoder --full --samples 4 -o FOLDER
    python models/build.py synthetic --nodes 5000 -o FOLDER      (and 20000, as synthetic_20000; likewise 50000)
    python benchmarks/fix_cost.py FOLDER [--json benchmarks/fix_cost.json]

Each model runs in a fresh process with `--no-verify` (AutoCast
compares nothing, either), and again with comparison and emulation. TensorRT's build is not
included. The operating system measures seconds and the peak resident set, for the process with its children.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

GOALS: dict[str, tuple[float | None, float | None, float, float | None]] = {
    "rtdetr": (83, 6800, 20, 1500),
    "esrgan": (11.6, None, 4, None),
    "whisper_encoder": (None, None, 12, None),
    "synthetic": (330, 500, 4, None),
    "synthetic_20000": (None, None, 15, None),
    "synthetic_50000": (None, None, 40, None),
}
"""User seconds and MB of AutoCast 0.47 on two cores, and our targets."""

Cost = dict[str, float]


def run(model: Path, samples: Path | None, extra: list[str], out: Path) -> Cost:
    """One `rewriter fix` in a process of its own; CPU seconds are those of both cores."""
    command = [sys.executable, "-m", "rewriter", "fix", str(model), "-o", str(out), "-q", *extra]
    if samples is not None:
        command += ["--inputs", str(samples)]
    start = time.perf_counter()
    with subprocess.Popen(command) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - start
    row = {"wall_s": wall, "user_s": usage.ru_utime, "system_s": usage.ru_stime}
    row |= {"peak_mb": usage.ru_maxrss / 1024, "exit_code": process.returncode}
    return {key: round(value, 0 if key == "peak_mb" else 2) for key, value in row.items()}


def measure(folder: Path, name: str) -> dict[str, Any]:
    """Costs of the runs of one model."""
    model = folder / f"{name}.onnx"
    samples = next((p for p in (folder / name, folder / f"{name}.npz") if p.exists()), None)
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "fixed.onnx"
        runs = {"no_verify": ["--no-verify"], "verified": ["--no-build"]}
        return {"model": name} | {kind: run(model, samples, extra, out) for kind, extra in runs.items()}


def line(row: dict[str, Any]) -> str:
    """A row of the table in benchmarks/README.md."""
    cells = [GOALS[row["model"]][:2], GOALS[row["model"]][2:]]
    cells += [(c["user_s"], c["peak_mb"]) for c in (row["no_verify"], row["verified"])]
    text = (", ".join("-" if value is None else f"{value:g}" for value in cell) for cell in cells)
    return f"| {row['model']} | {' | '.join(text)} |"


def main() -> None:
    """Measures every model of `GOALS` that the folder has."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for name in GOALS:
        if (arguments.folder / f"{name}.onnx").exists():
            rows.append(measure(arguments.folder, name))
            print(line(rows[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
