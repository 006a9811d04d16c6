"""`rewriter fix` on networks with trained weights, without a GPU, and what `rewriter verify` says of its file with the same data.

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


def run(command: str, *files: Path, samples: Path, report: Path) -> dict[str, Any]:
    """One run of a command: CPU seconds and memory are those of its largest process and its children."""
    line = [sys.executable, "-m", "rewriter", command, *map(str, files)]
    line += ["--inputs", str(samples), "--json", str(report), "-q"]
    start = time.perf_counter()
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - start
    row = {"exit": process.returncode, "user_s": round(used.ru_utime, 1), "wall_s": round(wall, 1)}
    return row | {"mb": used.ru_maxrss // 1024}


def fix_and_verify(model: Path, fixed: Path) -> dict[str, Any]:
    """`fix`, then `verify` of its file; "verify" has the verdict and the number of the second alone."""
    samples, report, again = (
        model.with_suffix("") / "tool",
        fixed.with_suffix(".json"),
        fixed.with_suffix(".verify.json"),
    )
    row = run("fix", model, Path("-o"), fixed, samples=samples, report=report)
    if not report.exists():
        return row
    row |= verdict(report)
    run("verify", model, fixed, samples=samples, report=again)
    if again.exists():
        found = json.loads(again.read_text())
        row["verify"] = {"passed": found["passed"], "error": largest(found["checks"])}
    return row


def largest(checks: list[dict[str, Any]]) -> float | None:
    """The largest error of an output, emulated; of a network in FP32, with TF32."""
    judged = [check for check in checks if check["name"] in ("emulation", "tf32")]
    return max((output["relative_l2"] for check in judged for output in check["outputs"]), default=None)


def verdict(report: Path) -> dict[str, Any]:
    """The ending and the checks, from the report."""
    found = json.loads(report.read_text())
    conclusion, checks = found["conclusion"], {one["name"]: one for one in found["checks"]}
    return {
        "ending": conclusion["kind"],
        "limit": conclusion["limit"],
        "checks": {name: one["passed"] for name, one in checks.items()},
        "fp32_nodes": len(found["plan"]["fp32"]) if found["plan"] else None,
        "error": largest(found["checks"]),
    }


def main(folder: Path, fixed: Path, out: Path, names: list[str]) -> None:
    fixed.mkdir(exist_ok=True)
    for model in sorted(folder.glob("*.onnx")):
        if not names or model.stem in names:
            row = fix_and_verify(model, fixed / model.name)
            found = json.loads(out.read_text()) if out.exists() else {}
            found.setdefault(model.stem, {})["cpu"] = row
            out.write_text(json.dumps(found, indent=1) + "\n")
            print(model.stem, row, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
