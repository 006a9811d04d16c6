"""The second stage of side_by_side.py: build every variant, then run and time all variants of a model in one process.

A build is a child process, several at a time; so are the runs of a model, one at a time. If the runs of a model die, each
variant is tried alone, and those that live are timed together.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.preparation import Limits, child, errors, feeds_of
from benchmarks.variants import VARIANTS
from rewriter.model import load

ROUNDS, WARM_UP_ROUNDS = 300, 50
TF32_OFF = {"NVIDIA_TF32_OVERRIDE": "0"}
"""On TensorRT-RTX 1.6.1 clearing the builder's flag changes nothing; this does."""


def build_all(models: Sequence[Path], jobs: int, limits: Limits) -> None:
    """Engines beside the variants of each model's folder, for the GPU at hand or for none."""

    def one(path: Path, stem: str, environment: dict[str, str]) -> None:
        engine, note = path.parent / f"{stem}.engine", path.parent / f"{stem}.built"
        if note.exists():
            return
        command = [sys.executable, "benchmarks/gpu.py", str(path), str(engine)]
        built = child(command, path.parent / f"{stem}.build.log", limits, environment)
        built["builds"] = engine.exists() and built["exit_code"] == 0
        note.write_text(json.dumps(built, indent=1))

    wanted = [(m / f"{v}.onnx", v, {}) for m in models for v in VARIANTS if (m / f"{v}.onnx").exists()]
    wanted += [(m / "fp32.onnx", "fp32-tf32-off", TF32_OFF) for m in models if (m / "fp32.onnx").exists()]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda job: one(*job), wanted))


def measure(work: Path, samples: Path, limits: Limits) -> None:
    """Errors and latencies of one model into WORK/measured.json, and FP32 without TF32 beside it."""
    names = [v for v in VARIANTS if (work / f"{v}.engine").exists()]
    died: dict[str, Any] = {}
    done = _runs(work, samples, names, "measured", limits)
    if done["exit_code"]:
        alone = {v: _runs(work, samples, [v], "alone", limits) for v in names}
        died = {v: {"note": f"the run died: {a['note']}"} for v, a in alone.items() if a["exit_code"]}
        _runs(work, samples, [v for v in names if v not in died], "measured", limits)
    if (work / "fp32-tf32-off.engine").exists():
        _runs(work, samples, ["fp32-tf32-off"], "measured-tf32-off", limits, TF32_OFF)
    found = work / "measured.json"
    if died:
        rows = json.loads(found.read_text()) if found.exists() else {}
        found.write_text(json.dumps(rows | died, indent=1))


def _runs(
    work: Path, samples: Path, names: Sequence[str], out: str, limits: Limits, environment: Any = None
) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__)), str(work), str(samples), out, *names]
    return child(command, work / f"{out}.log", limits, environment)


def run(work: Path, samples: Path, out: str, names: Sequence[str]) -> None:
    """In a process of its own: the engines side by side on one sample, interleaved."""
    import torch

    from benchmarks.gpu import Engine, trt

    feeds, original = feeds_of(samples), load(work / "fp32.onnx")
    with np.load(work / "expected.npz") as archive:
        expected = dict(archive)
    rows: dict[str, Any] = {name: {} for name in names}
    engines = {}
    for name in names:
        try:
            engines[name] = Engine(work / f"{name}.engine", feeds)
            rows[name]["errors"] = errors(original, expected, engines[name].outputs(list(expected)))
        except Exception as error:
            rows[name]["note"] = str(error).splitlines()[0][:200]
    times: dict[str, list[float]] = {name: [] for name in engines}
    order = list(engines)
    for round_ in range(ROUNDS):
        for name in order:
            elapsed = engines[name].time_us()
            if round_ >= WARM_UP_ROUNDS:
                times[name].append(elapsed)
        order = [*order[1:], *order[:1]]  # nobody always follows the same neighbour
    for name, measured in times.items():
        quarters = statistics.quantiles(measured, n=4)
        rows[name]["latency_us"] = round(statistics.median(measured), 1)
        rows[name]["spread_us"] = round(quarters[2] - quarters[0], 1)
        rows[name]["cuda_graph"] = engines[name].graph is not None
    host = {"gpu": torch.cuda.get_device_name(), "library": trt.__name__, "version": trt.__version__}
    host["tf32_override"] = os.environ.get("NVIDIA_TF32_OVERRIDE", "")
    (work / f"{out}.json").write_text(json.dumps({"host": host} | rows, indent=1))


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
