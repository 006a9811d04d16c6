"""`fix` of networks with trained weights, without a GPU, and `verify` and `scan` with the same data.

    python benchmarks/trained.py FOLDER FIXED ROWS.json [NAME ...]

FOLDER is that of trained_inputs.py; the commands get NAME/inputs. Fixed models and reports go to FIXED. ROWS.json keeps
what it has of other runs: each network's row goes under "cpu". TensorRT-RTX builds without a GPU, so "build" is real
there; errors are emulated, and no latency is measured.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

LIMIT_S = 300
"""Seconds of one command."""


def run(command: str, *words: str | Path, report: Path) -> dict[str, Any]:
    """One run of a command: its exit code, and the CPU seconds and memory of it and its children."""
    line = [sys.executable, "-m", "rewriter", command, *map(str, words), "--json", str(report), "-q"]
    report.unlink(missing_ok=True)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(line, preexec_fn=lambda: signal.alarm(LIMIT_S), **quiet) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return {
        "exit": process.returncode,
        "user_s": round(used.ru_utime, 1),
        "mb": used.ru_maxrss // 1024,
    }


def row(fixed: Path, commands: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The endings of the three commands, from their reports beside `fixed`."""
    found = {name: read(fixed, name) for name in commands}
    fix, verify, scan = (found.get(name) or {} for name in ("fix", "verify", "scan"))
    result = dict(commands["fix"])
    if fix:
        plan = fix["plan"] or {}
        result |= {
            "ending": fix["conclusion"]["kind"],
            "gaps": [gap["kind"] for gap in fix["gaps"]],
            "limit": fix["conclusion"]["limit"],
            "checks": {check["name"]: check["passed"] for check in fix["checks"]},
            "fp32_nodes": len(plan["fp32"]) if plan else None,
            "float_nodes": plan.get("float_nodes"),
            **errors(fix["checks"]),
        }
    if verify:
        result["verify"] = {"passed": verify["passed"], **errors(verify["checks"])}
    if scan:
        result["scan"] = {"exit": commands["scan"]["exit"], "plain": (scan["plain"] or {}).get("passed")}
    return result


def read(fixed: Path, command: str) -> dict[str, Any]:
    path = fixed.with_suffix(f".{command}.json")
    return dict(json.loads(path.read_text())) if path.exists() else {}


def errors(checks: list[dict[str, Any]]) -> dict[str, float | None]:
    """The largest relative L2 error of an output, and of a part of one; of a network in FP32, with TF32."""
    outputs = [o for check in checks if check["name"] in ("emulation", "tf32") for o in check["outputs"]]
    whole, parts = ([o["relative_l2"] for o in outputs if bool(o["of"]) is part] for part in (False, True))
    return {"error": max(whole, default=None), "part": max(parts, default=None)}


def main(folder: Path, results: Path, out: Path, names: list[str]) -> None:
    results.mkdir(exist_ok=True)
    for network in sorted(path.parent for path in folder.glob("*/model.onnx")):
        if names and network.name not in names:
            continue
        model, fixed, data = network / "model.onnx", results / f"{network.name}.onnx", network / "inputs"
        words: dict[str, tuple[str | Path, ...]] = {
            "fix": (model, "-o", fixed),
            "verify": (model, fixed),
            "scan": (model, "--fail-on", "error"),
        }
        fixed.unlink(missing_ok=True)
        done = dict[str, dict[str, Any]]()
        for name, line in words.items():
            if name != "verify" or fixed.exists():
                done[name] = run(name, *line, "--inputs", data, report=fixed.with_suffix(f".{name}.json"))
        rows = json.loads(out.read_text()) if out.exists() else {}
        rows.setdefault(network.name, {})["cpu"] = row(fixed, done)
        out.write_text(json.dumps(rows, indent=1) + "\n")
        print(network.name, json.dumps(rows[network.name]["cpu"]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
