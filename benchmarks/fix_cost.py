"""Cost of `rewriter fix` as a whole process: seconds and peak memory, against AutoCast's measured figures.

    python models/build.py nafnet vit swin rtdetr esrgan crepe whisper_encoder --full --samples 4 -o FOLDER
    python models/build.py synthetic --nodes 5000 -o FOLDER      (and 20000, as synthetic_20000; likewise 50000)
    python benchmarks/fix_cost.py FOLDER [--json benchmarks/fix_cost.json]

`ppocr_rec` is a network of benchmarks/trained_inputs.py. Each model runs in a fresh process with `--no-verify` (AutoCast
compares nothing, either), and again with comparison and emulation. TensorRT's build is not
included. The operating system measures seconds and the peak resident set, for the process with its children.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

GOALS: dict[str, tuple[float | None, float | None, float, float | None]] = {
    "vit": (14.0, 1450, 5, 600),
    "nafnet": (14.7, 7600, 12, 800),
    "swin": (58, 4300, 12, 1200),
    "rtdetr": (83, 6800, 20, 1500),
    "esrgan": (11.6, None, 8, None),
    "crepe": (12, None, 10, None),
    "whisper_encoder": (None, None, 5, None),
    "ppocr_rec": (None, None, 8, None),
    "synthetic": (330, 500, 4, None),
    "synthetic_20000": (None, None, 16, None),
    "synthetic_50000": (None, None, 45, None),
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
    count = "import onnx, sys; print(len(onnx.load(sys.argv[1]).graph.node))"
    command = [sys.executable, "-c", count, str(model)]  # a child starts with the peak memory of its parent
    nodes = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "fixed.onnx"
        return {
            "model": name,
            "megabytes": round(model.stat().st_size / 1e6, 1),
            "nodes": nodes,
            "no_verify": run(model, samples, ["--no-verify"], out),
            "verified": run(model, samples, ["--no-build"], out),
        }


def line(row: dict[str, Any]) -> str:
    """A row of the table in benchmarks/README.md."""
    cells = [GOALS[row["model"]][:2], GOALS[row["model"]][2:]]
    cells += [(c["user_s"], c["peak_mb"]) for c in (row["no_verify"], row["verified"])]
    text = (", ".join("-" if value is None else f"{value:g}" for value in cell) for cell in cells)
    return f"| {row['model']} | {row['nodes']} | {' | '.join(text)} |"


def main() -> None:
    """Measures every model of `GOALS` that the folder has."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    present = [name for name in GOALS if (arguments.folder / f"{name}.onnx").exists()]
    rows = []
    for name in present:
        rows.append(measure(arguments.folder, name))
        print(line(rows[-1]), flush=True)
    if arguments.json:
        host = {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
        arguments.json.write_text(json.dumps({"host": host, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
