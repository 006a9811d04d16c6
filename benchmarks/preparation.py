"""The first stage of side_by_side.py, which needs no GPU: make each variant, count it, and emulate it.

Every step is a child process, so that a tool that crashes is a row with a note and its time and memory are its own. What
is there already is not made again: a stage that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.census import census
from rewriter import checks, facts
from rewriter.compare import compare
from rewriter.emulation import Accumulation, emulation
from rewriter.model import Array, Model, load

ROOT = Path(__file__).resolve().parent.parent
SELECTING = frozenset({"TopK", "NonMaxSuppression"})


def prepare(
    path: Path,
    samples: Path,
    work: Path,
    variants: Sequence[str],
    python: str,
    accumulations: Sequence[str],
    limits: Limits,
) -> None:
    """All variants of one model into `work`; `python` is the interpreter that has the other tools."""
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "expected.npz").exists():
        _own("expect", path, samples, work)
    for name in variants:
        prepare_variant(path, samples, work, name, python, accumulations, limits)


def prepare_variant(
    path: Path,
    samples: Path,
    work: Path,
    name: str,
    python: str,
    accumulations: Sequence[str],
    limits: Limits,
    extra: Sequence[str] = (),
) -> None:
    """One variant: made, counted and emulated; `extra` are more arguments for its tool."""
    out, stats = work / f"{name}.onnx", work / f"{name}.json"
    row = json.loads(stats.read_text()) if stats.exists() else {}
    if "tool" not in row:
        out.unlink(missing_ok=True)
        foreign = name in {"autocast", "onnxconverter-common"}
        command = [python if foreign else sys.executable, "benchmarks/variants.py", name]
        row["tool"] = child(
            [*command, str(path), str(samples), str(out), *extra], work / f"{name}.log", limits
        )
        row["made"] = out.exists() and row["tool"]["exit_code"] == 0
        stats.write_text(json.dumps(row, indent=1))
    if row["made"] and "fp32_nodes" not in row:
        _own("count", path, samples, work, name)
    for accumulation in accumulations if name != "fp32" else ():
        if row["made"] and f"emulated_{accumulation}" not in json.loads(stats.read_text()):
            _own("emulate", path, samples, work, name, accumulation)


@dataclass(frozen=True)
class Limits:
    """What a child process may use before it is stopped: seconds, and resident memory in GB (of itself alone)."""

    seconds: float = 1800.0
    gigabytes: float = math.inf


def child(
    command: Sequence[str], log: Path, limits: Limits, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run a command from the repository's root: seconds, peak memory in MB with its children, and how it ended."""
    start = time.perf_counter()
    variables = {**os.environ, **(environment or {})}
    with (
        log.open("wb") as stream,
        subprocess.Popen(command, stdout=stream, stderr=stream, cwd=ROOT, env=variables) as process,
    ):
        stopped = ""
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            if not stopped:
                stopped = _exceeded(process.pid, time.perf_counter() - start, limits)
                if stopped:
                    process.kill()
            time.sleep(0.02)
        process.returncode = os.waitstatus_to_exitcode(status)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    failed = process.returncode != 0
    return {
        "wall_s": round(time.perf_counter() - start, 2),
        "user_s": round(usage.ru_utime, 2),
        "peak_mb": round(usage.ru_maxrss / 1024),
        "exit_code": process.returncode,
        "note": stopped or (lines[-1][:200] if failed and lines else ""),
    }


def _exceeded(pid: int, seconds: float, limits: Limits) -> str:
    """Which limit a running process is beyond, in words; "" if none."""
    if seconds > limits.seconds:
        return f"stopped after {limits.seconds:.0f} s"
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return ""
    used = pages * os.sysconf("SC_PAGE_SIZE") / 1e9
    return f"stopped at {used:.1f} GB" if used > limits.gigabytes else ""


def _own(step: str, path: Path, samples: Path, work: Path, *more: str) -> None:
    """A step of this file in a child process; what it says is shown if it fails."""
    command = [sys.executable, str(Path(__file__)), step, str(path), str(samples), str(work), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{work.name} {step} {' '.join(more)}: {done.stderr.strip().splitlines()[-1:]}", flush=True)
        if more:
            _note(work / f"{more[0]}.json", {f"{step}_failed": done.stderr.strip()[-300:]})


def _note(stats: Path, found: dict[str, Any]) -> None:
    stats.write_text(json.dumps(json.loads(stats.read_text()) | found, indent=1))


def feeds_of(samples: Path) -> dict[str, Array]:
    """The first sample: the one that outputs are compared on."""
    with np.load(sorted(samples.glob("*.npz"))[0]) as archive:
        return dict(archive)


def errors(model: Model, expected: dict[str, Array], actual: dict[str, Array]) -> dict[str, float | None]:
    """Relative L2 error of each output, None where it is not finite; as a set for models that select their rows."""
    as_sets = any(node.op_type in SELECTING for node in model.proto.graph.node)
    actual = {n: a.astype(expected[n].dtype) for n, a in actual.items()}
    rows = compare(expected, actual, checks.EMULATION_TOLERANCE["fp16"], as_sets=as_sets)
    return {r.name: float(r.relative_l2) if r.finite and math.isfinite(r.relative_l2) else None for r in rows}


def worst(found: Mapping[str, Any] | None) -> float | None:
    """The worst output's error; infinity where one is not finite, None if nothing was measured."""
    if not found or not found.get("errors"):
        return None
    return max(math.inf if e is None else e for e in found["errors"].values())


def expect(path: Path, samples: Path, work: Path) -> None:
    """The original's outputs in FP32 on ONNX Runtime's CPU."""
    (outputs,) = checks.expected_outputs(load(path), [feeds_of(samples)]).exact
    np.savez(work / "expected.npz", **outputs)


def count(path: Path, samples: Path, work: Path, name: str) -> None:
    _note(work / f"{name}.json", asdict(census(onnx.load(work / f"{name}.onnx"))))


def emulate(path: Path, samples: Path, work: Path, name: str, accumulation: Accumulation) -> None:
    with np.load(work / "expected.npz") as archive:
        expected = dict(archive)
    model = load(work / f"{name}.onnx")
    start = time.perf_counter()
    (outputs,) = checks.run_all(
        emulation(model, facts.infer(model), accumulation, tf32=True),
        [checks.as_declared(model, feeds_of(samples))],
    )
    found = {
        "errors": errors(model, expected, outputs),
        "seconds": round(time.perf_counter() - start, 1),
    }
    _note(work / f"{name}.json", {f"emulated_{accumulation}": found})


if __name__ == "__main__":
    step, *paths = sys.argv[1:5]
    {"expect": expect, "count": count, "emulate": emulate}[step](*map(Path, paths), *sys.argv[5:])
