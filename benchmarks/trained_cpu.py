"""`rewriter fix` on networks with trained weights, without a GPU: its ending, verdict, exit code, seconds and memory.

    python benchmarks/trained_cpu.py FOLDER FIXED OUT.json [NAME ...]

FOLDER is that of benchmarks/trained_inputs.py; the tool gets NAME/tool. Fixed models go to FIXED, for
benchmarks/trained_results.py. OUT.json keeps what it has of other parts: each network's results go under "cpu".
TensorRT-RTX builds without a GPU, so "builds" is real there; errors are emulated, and no latency is known.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def fix(model: Path, fixed: Path) -> dict[str, Any]:
    """One run of `rewriter fix`: CPU seconds and memory are those of its largest process and its children."""
    report = fixed.with_suffix(".json")
    command = [sys.executable, "-m", "rewriter", "fix", str(model), "-o", str(fixed)]
    command += ["--inputs", str(model.with_suffix("") / "tool"), "--json", str(report), "-q"]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - start
    row = {"exit": process.returncode, "user_s": round(used.ru_utime, 1), "wall_s": round(wall, 1)}
    return row | {"mb": used.ru_maxrss // 1024} | (verdict(report) if report.exists() else {})


def verdict(report: Path) -> dict[str, Any]:
    """The ending and the checks, from the report."""
    found = json.loads(report.read_text())
    conclusion, checks = found["conclusion"], {one["name"]: one for one in found["checks"]}
    errors = [o["relative_l2"] for o in checks.get("emulation", {}).get("outputs", [])]
    return {
        "ending": conclusion["kind"],
        "limit": conclusion["limit"],
        "checks": {name: one["passed"] for name, one in checks.items()},
        "fp32_nodes": len(found["plan"]["fp32"]) if found["plan"] else None,
        "error": max(errors, default=None),
    }


def main(folder: Path, fixed: Path, out: Path, names: list[str]) -> None:
    fixed.mkdir(exist_ok=True)
    for model in sorted(folder.glob("*.onnx")):
        if not names or model.stem in names:
            row = fix(model, fixed / model.name)
            found = json.loads(out.read_text()) if out.exists() else {}
            found.setdefault(model.stem, {})["cpu"] = row
            out.write_text(json.dumps(found, indent=1) + "\n")
            print(model.stem, row, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
