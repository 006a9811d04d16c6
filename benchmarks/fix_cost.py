"""Cost of `rewriter fix` as a whole process: seconds and peak memory, against AutoCast's measured figures.

    python models/build.py nafnet vit swin rtdetr esrgan crepe whisper_encoder --full --samples 4 -o FOLDER
    python models/build.py synthetic --nodes 5000 -o FOLDER      (and 20000, as synthetic_20000; likewise 50000)
    python benchmarks/fix_cost.py FOLDER [--json benchmarks/fix_cost.json] [--no-verify]

`ppocr_rec` is a network of benchmarks/trained_inputs.py. Each model runs twice in a fresh process: with `--no-verify`
(like AutoCast, which compares nothing), and with comparison and emulation, unless `--no-verify` is given. The build is not included, because that is TensorRT's own time. The operating system measures
user and system seconds and the peak resident set, for the process with its children.
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
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Goal:
    """AutoCast 0.47's figures on two cores, and our targets (user seconds, MB)."""

    autocast_s: float | None
    autocast_mb: float | None
    seconds: float
    megabytes: float | None


GOALS = {
    "vit": Goal(14.0, 1450, 5, 600),
    "nafnet": Goal(14.7, 7600, 12, 800),
    "swin": Goal(58, 4300, 12, 1200),
    "rtdetr": Goal(83, 6800, 20, 1500),
    "esrgan": Goal(11.6, None, 8, None),
    "crepe": Goal(12, None, 10, None),
    "whisper_encoder": Goal(None, None, 5, None),
    "ppocr_rec": Goal(None, None, 8, None),
    "synthetic": Goal(330, 500, 4, None),
    "synthetic_20000": Goal(None, None, 16, None),
    "synthetic_50000": Goal(None, None, 45, None),
}


@dataclass(frozen=True)
class Cost:
    """One run. `user_s` and `system_s` are CPU seconds over both cores."""

    wall_s: float
    user_s: float
    system_s: float
    peak_mb: float
    exit_code: int


def run(model: Path, samples: Path | None, extra: list[str], out: Path) -> Cost:
    """One `rewriter fix` in a process of its own."""
    command = [sys.executable, "-m", "rewriter", "fix", str(model), "-o", str(out), "-q", *extra]
    if samples is not None:
        command += ["--inputs", str(samples)]
    start = time.perf_counter()
    with subprocess.Popen(command) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - start
    return Cost(
        round(wall, 2),
        round(usage.ru_utime, 2),
        round(usage.ru_stime, 2),
        round(usage.ru_maxrss / 1024),
        process.returncode,
    )


def measure(folder: Path, name: str, *, verifies: bool) -> dict[str, object]:
    """Costs of the runs of one model, and counts of the result's nodes."""
    model = folder / f"{name}.onnx"
    samples = next((p for p in (folder / name, folder / f"{name}.npz") if p.exists()), None)
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "fixed.onnx"
        plain = run(model, samples, ["--no-verify"], out)
        verified = run(model, samples, ["--no-build"], out) if verifies else None
        count = "import onnx, sys; print(*[n.op_type for n in onnx.load(sys.argv[1]).graph.node])"
        before, after = (_operators(count, path) for path in (model, out))
    return {
        "model": name,
        "megabytes": round(model.stat().st_size / 1e6, 1),
        "nodes": len(before),
        "goal": asdict(GOALS[name]),
        "no_verify": asdict(plain),
        "verified": None if verified is None else asdict(verified),
        "layer_normalizations": after.count("LayerNormalization"),
    }


def _operators(count: str, path: Path) -> list[str]:
    """Operators of a model, read by another process: a child starts with the peak memory of its parent."""
    done = subprocess.run(
        [sys.executable, "-c", count, str(path)], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def table(rows: list[dict[str, object]]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| model | nodes | AutoCast 0.47: s, MB | to reach | fix --no-verify: user s, wall s, MB | with comparison | LayerNormalization |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        goal, plain, verified = row["goal"], row["no_verify"], row["verified"]
        lines.append(
            f"| {row['model']} | {row['nodes']} | {goal['autocast_s'] or '-'}, {goal['autocast_mb'] or '-'} "
            f"| {goal['seconds']}, {goal['megabytes'] or '-'} "
            f"| {_cell(plain)} "
            f"| {_cell(verified)} | {row['layer_normalizations']} |"
        )
    return "\n".join(lines)


def _cell(cost: dict[str, float] | None) -> str:
    return "-" if cost is None else f"{cost['user_s']}, {cost['wall_s']}, {cost['peak_mb']}"


def main() -> None:
    """Measures every model of `GOALS` that the folder has."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--no-verify", action="store_true", help="measure the run with --no-verify alone")
    arguments = parser.parse_args()
    present = [name for name in GOALS if (arguments.folder / f"{name}.onnx").exists()]
    rows = [measure(arguments.folder, name, verifies=not arguments.no_verify) for name in present]
    print(table(rows))
    if arguments.json:
        host = {
            "cpu_count": os.cpu_count(),
            "machine": platform.machine(),
            "python": platform.python_version(),
        }
        arguments.json.write_text(json.dumps({"host": host, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
