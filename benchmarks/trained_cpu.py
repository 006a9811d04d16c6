"""`rewriter fix` on networks with trained weights, without a GPU, then `rewriter verify` of its file with the same data.

    python benchmarks/trained_cpu.py FOLDER OUT.json [NAME ...]

FOLDER is that of benchmarks/trained_inputs.py. OUT.json keeps what it has of other parts: each network's results go under
"cpu". TensorRT-RTX builds without a GPU, so "build" is real there; errors are emulated, and no latency is known.
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


def fix_and_verify(folder: Path) -> dict[str, Any]:
    """`fix`, then `verify` of its file; "verify" has the verdict and the number of the second alone."""
    model, fixed, samples = folder / "model.onnx", folder / "cpu.onnx", folder / "inputs"
    report, again = folder / "cpu.json", folder / "cpu.verify.json"
    row = run("fix", model, Path("-o"), fixed, samples=samples, report=report)
    if not report.exists():
        return row
    found = json.loads(report.read_text())
    row |= {"ending": found["ending"], "limit": found["conclusion"]["limit"]}
    row |= {"checks": {check["name"]: check["passed"] for check in found["checks"]}}
    row |= {"fp32_nodes": len(found["plan"]["fp32"]) if found["plan"] else None}
    row |= {"error": largest(found["checks"])}
    run("verify", model, fixed, samples=samples, report=again)
    if again.exists():
        found = json.loads(again.read_text())
        row["verify"] = {"passed": found["passed"], "error": largest(found["checks"])}
    return row


def largest(checks: list[dict[str, Any]]) -> float | None:
    """The largest error of an output, emulated; of a network in FP32, with TF32."""
    judged = [check for check in checks if check["name"] in ("emulation", "tf32")]
    return max((output["relative_l2"] for check in judged for output in check["outputs"]), default=None)


def main(folder: Path, out: Path, names: list[str]) -> None:
    for model in sorted(folder.glob("*/model.onnx")):
        if (name := model.parent.name) in (names or [name]):
            row = fix_and_verify(model.parent)
            found = json.loads(out.read_text()) if out.exists() else {}
            found.setdefault(name, {})["cpu"] = row
            out.write_text(json.dumps(found, indent=1) + "\n")
            print(name, row, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
