"""The second and third stage of side_by_side.py: build every variant, then run and time all variants of a model.

Both use what `rewriter verify` uses (rewriter/engines): a build is a child process, several at a time; the variants of a
model run in one process, on the same sample, timed in turn. FP32 without TF32 runs in a process of its own. If a process
dies, its engines run one by one, and those that live are timed together.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.preparation import Limits, errors, feeds_of, prepare_variant
from benchmarks.variants import SEARCHED, VARIANTS
from rewriter.engines import host
from rewriter.engines.measure import build_variant, measure
from rewriter.engines.protocol import EngineName, Outcome, Settings, Variant
from rewriter.engines.tensors import write_samples
from rewriter.errors import EngineError
from rewriter.model import Array, Model, load

WITHOUT_TF32 = "fp32-tf32-off"


@dataclass(frozen=True)
class Case:
    """A model of the benchmark: its file, its samples, and the folder that the stages keep things in."""

    path: Path
    samples: Path
    work: Path


def builder() -> EngineName:
    """The engine that builds here: the GPU's, or, with no GPU, TensorRT-RTX, which needs none to build."""
    return host.choose().engine or "tensorrt-rtx"


def runner() -> EngineName:
    """The engine that runs here.

    Raises:
        EngineError: none does.
    """
    choice = host.choose()
    if choice.engine is None:
        raise EngineError(
            f"no engine runs here: {'; '.join(choice.reasons)}",
            hint="measure on a machine with a GPU, or --engine onnxruntime to try the stage itself",
        )
    return choice.engine


def build_all(cases: Sequence[Case], engine: EngineName, jobs: int, limits: Limits) -> None:
    """Engines beside the variants in each model's folder, for the GPU at hand or for none."""
    wanted = [(case.work, variant) for case in cases for variant in _variants(case)]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda job: _build(*job, engine, limits), wanted))


def _variants(case: Case) -> list[Variant]:
    """All that `prepare` made, and the original once more, without TF32; on the first sample."""
    samples = write_samples(case.work / "sample", [feeds_of(case.samples)])
    named = [(name, case.work / f"{name}.onnx") for name in VARIANTS]
    found = [Variant(name, path, samples) for name, path in named if _made(path)]
    original = case.work / "fp32.onnx"
    return [*found, *([Variant(WITHOUT_TF32, original, samples, tf32=False)] if original.exists() else [])]


def _made(path: Path) -> bool:
    stats = path.with_suffix(".json")
    return path.exists() and stats.exists() and bool(json.loads(stats.read_text()).get("made"))


def _build(work: Path, variant: Variant, engine: EngineName, limits: Limits) -> None:
    note, start = work / f"{variant.name}.built", time.perf_counter()
    if note.exists():
        return
    settings = Settings(engine, build_timeout_s=limits.seconds)
    found = build_variant(variant, settings, work / f"{variant.name}.engine")
    refused = isinstance(found, Outcome)
    built = {"builds": not refused, "wall_s": round(time.perf_counter() - start, 2)}
    note.write_text(
        json.dumps(built | {"note": found.problem if isinstance(found, Outcome) else ""}, indent=1)
    )


def measure_case(case: Case, engine: EngineName, limits: Limits) -> None:
    """Errors and latencies of one model's variants into WORK/measured.json."""
    variants = []
    for variant in _variants(case):
        built = case.work / f"{variant.name}.engine"
        if engine.startswith("onnxruntime"):
            variants.append(variant)
        elif built.exists():
            variants.append(replace(variant, engine=built))
    original = load(case.work / "fp32.onnx")
    with np.load(case.work / "expected.npz") as archive:
        expected = dict(archive)
    with tempfile.TemporaryDirectory(dir=case.work) as folder:
        outcomes = measure(variants, Settings(engine, run_timeout_s=limits.seconds), Path(folder))
        rows = {outcome.variant: _row(outcome, original, expected) for outcome in outcomes}
    ran = next((outcome for outcome in outcomes if outcome.device), None)
    library, _, version = (ran.library if ran else "").partition(" ")
    machine = {"gpu": ran.device if ran else "", "library": library, "version": version}
    (case.work / "measured.json").write_text(json.dumps({"host": machine} | rows, indent=1))


def _row(outcome: Outcome, original: Model, expected: dict[str, Array]) -> dict[str, Any]:
    if not outcome.ran:
        return {"note": outcome.problem}
    row: dict[str, Any] = {"errors": errors(original, expected, outcome.values(0))}
    if outcome.latency is not None:
        row["latency_us"] = round(outcome.latency.median_us, 1)
        row["spread_us"] = round(outcome.latency.iqr_us, 1)
        row["cuda_graph"] = outcome.latency.cuda_graph
    return row


def search_case(
    case: Case, engine: EngineName, accumulations: Sequence[str], limits: Limits, seconds: float
) -> None:
    """`fix --search gpu` for so many seconds a model; then all variants once more.

    It looks for the fastest plan that is no less accurate than that of `fix`, or the most accurate that is no
    slower. What it tried is in WORK/fix-search-gpu.report.
    """
    measured = json.loads((case.work / "measured.json").read_text())
    if SEARCHED in measured:
        return
    extra = ["--search-seconds", f"{seconds:g}"]
    prepare_variant(
        case.path, case.samples, case.work, SEARCHED, sys.executable, accumulations, limits, extra
    )
    if not _made(case.work / f"{SEARCHED}.onnx"):
        print(f"{case.work.name}: the search made nothing; {SEARCHED}.log says why", flush=True)
        return
    build_all([case], engine, 1, limits)
    measure_case(case, engine, limits)
    print(f"{case.work.name}: searched", flush=True)
