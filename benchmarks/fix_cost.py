"""Cost of `rewriter fix` as a whole process: seconds and peak memory, against AutoCast's measured figures.

    python models/build.py rtdetr esrgan whisper_encoder --full --samples 4 -o FOLDER
    python models/build.py synthetic --nodes 5000 -o FOLDER      (and 20000, as synthetic_20000; likewise 50000)
    python benchmarks/fix_cost.py FOLDER OUT.json

Each model runs in a fresh process with `--no-verify` (AutoCast compares nothing, either), and again with comparison and
emulation; TensorRT's build is not included. The operating system measures the process with its children.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

GOALS: dict[str, tuple[float | None, float | None, float, float | None]] = {
    "rtdetr": (83, 6800, 12, 1500),
    "esrgan": (11.6, None, 6, None),
    "whisper_encoder": (None, None, 15, None),
    "synthetic": (330, 500, 2.5, None),
    "synthetic_20000": (None, None, 9, None),
    "synthetic_50000": (None, None, 25, None),
}
"""User seconds and MB of AutoCast 0.47 on two cores, and our targets."""


def run(model: Path, samples: Path, extra: str) -> tuple[float, float]:
    """User seconds of both cores and peak MB of one `rewriter fix` in a process of its own."""
    with tempfile.TemporaryDirectory() as place:
        words = ["fix", model, "--inputs", samples, "-o", f"{place}/fixed.onnx", "-q", extra]
        with subprocess.Popen([sys.executable, "-m", "rewriter", *map(str, words)]) as process:
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
    return round(usage.ru_utime, 2), round(usage.ru_maxrss / 1024)


def main(folder: Path, out: Path) -> None:
    """Prints the rows of the table in benchmarks/README.md."""
    rows = {}
    for name, goals in GOALS.items():
        if (model := folder / f"{name}.onnx").exists():
            samples = next(p for p in (folder / name, folder / f"{name}.npz") if p.exists())
            runs = [run(model, samples, extra) for extra in ("--no-verify", "--no-build")]
            pairs = (goals[:2], goals[2:], *runs)
            cells = (", ".join("-" if value is None else f"{value:g}" for value in pair) for pair in pairs)
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
            rows[name] = {"no_verify": runs[0], "verified": runs[1]}
    out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
