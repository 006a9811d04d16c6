"""The second and third stage of side_by_side.py: builds every variant, then runs and times all variants of a model.

Both use the engines of `rewriter verify` (rewriter/engines). A build is a child process, several at a time. The variants
of a model run in one process and are timed in turn, on the sample that no tool saw. FP32 without TF32 runs in a process
of its own. If a process dies, its engines run one by one, and those that survive are timed together. A model that fails
as a whole is reported, and the others continue.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.children import Limits
from benchmarks.comparison import Case, errors, feeds_of, read_json, write_json
from benchmarks.variants import VARIANTS
from rewriter.engines import this_machine
from rewriter.engines.measure import build_variant, measure
from rewriter.engines.protocol import EngineName, EngineOutcome, MeasureSettings, Variant
from rewriter.engines.tensor_files import write_samples
from rewriter.errors import EngineError
from rewriter.model import Array, Model, load

WITHOUT_TF32 = "fp32-tf32-off"


def builder() -> EngineName:
    """The engine that builds here: the GPU's or, without a GPU, TensorRT-RTX, which needs none to build."""
    return this_machine.choose().engine or "tensorrt-rtx"


def runner() -> EngineName:
    """The engine that runs here.

    Raises:
        EngineError: none does.
    """
    choice = this_machine.choose()
    if choice.engine is None:
        raise EngineError(
            f"no engine runs here: {'; '.join(choice.reasons)}",
            hint="measure on a machine with a GPU, or --engine onnxruntime to try the stage itself",
        )
    return choice.engine


def each(cases: Sequence[Case], stage: Callable[[Case], str]) -> None:
    """Runs one stage for every model and prints a line for each; a failure is reported and stops no other model."""
    for case in cases:
        start = time.perf_counter()
        try:
            summary = stage(case)
        except Exception as error:
            summary = f"{type(error).__name__}: {error}"
        print(f"{case.name}: {summary}; {time.perf_counter() - start:.0f} s", flush=True)


def build_all(cases: Sequence[Case], engine: EngineName, jobs: int, limits: Limits) -> None:
    """Builds an engine next to each variant, for this machine's GPU or without one; the largest models first."""
    started = time.perf_counter()
    wanted: list[tuple[Case, Variant]] = []
    for case in cases:
        variants = _variants(case)
        wanted += [(case, variant) for variant in variants]
        if not variants:
            print(f"{case.name}: there is no variant to build", flush=True)
    wanted.sort(key=lambda job: -job[1].path.stat().st_size)
    left = Counter(case.name for case, _ in wanted)
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(_build, case.work, variant, engine, limits): case for case, variant in wanted}
        for future in as_completed(running):
            case = running[future]
            if raised := future.exception():
                print(f"{case.name}: {type(raised).__name__}: {raised}", flush=True)
            left[case.name] -= 1
            if not left[case.name]:
                print(f"{_built(case)}; {time.perf_counter() - started:.0f} s", flush=True)


def _built(case: Case) -> str:
    notes = {path.stem: read_json(path) for path in sorted(case.work.glob("*.built"))}
    failed = [f"{name}: {note['note'][:150]}" for name, note in notes.items() if not note["builds"]]
    return "; ".join([f"{case.name}: {len(notes) - len(failed)} of {len(notes)} variants build", *failed])


def _variants(case: Case) -> list[Variant]:
    """All variants that `prepare` made, and the original again without TF32; on the first sample."""
    named = [(name, case.work / f"{name}.onnx") for name in VARIANTS]
    made = [(name, path) for name, path in named if _made(path)]
    if not made:
        return []
    samples = write_samples(case.work / "sample", [feeds_of(case.samples)])
    found = [Variant(name, path, samples) for name, path in made]
    return [*found, *(Variant(WITHOUT_TF32, path, samples, tf32=False) for n, path in made if n == "fp32")]


def _made(path: Path) -> bool:
    return path.exists() and bool(read_json(path.with_suffix(".json")).get("made"))


def _build(work: Path, variant: Variant, engine: EngineName, limits: Limits) -> None:
    note, start = work / f"{variant.name}.built", time.perf_counter()
    if note.exists():
        return
    settings = MeasureSettings(engine, build_timeout_s=limits.seconds)
    found = build_variant(variant, settings, work / f"{variant.name}.engine")
    built = {"builds": not isinstance(found, EngineOutcome), "wall_s": round(time.perf_counter() - start, 2)}
    write_json(note, built | {"note": found.problem if isinstance(found, EngineOutcome) else ""})


def measure_case(case: Case, engine: EngineName, limits: Limits) -> str:
    """Writes errors and latencies of one model's variants to measured.json, unless it has all; returns a line about it."""
    variants = []
    for variant in _variants(case):
        built = case.work / f"{variant.name}.engine"
        if engine.startswith("onnxruntime"):
            variants.append(variant)
        elif built.exists():
            variants.append(replace(variant, engine=built))
    if not variants:
        return "there is no variant to run"
    file = case.work / "measured.json"
    if not {variant.name for variant in variants} <= read_json(file).keys():
        original = load(case.path)
        with np.load(case.work / "expected.npz") as archive:
            expected = dict(archive)
        with tempfile.TemporaryDirectory(dir=case.work) as folder:
            outcomes = measure(variants, MeasureSettings(engine, run_timeout_s=limits.seconds), Path(folder))
            rows = {outcome.variant: _row(outcome, original, expected) for outcome in outcomes}
        write_json(file, {"host": _machine(outcomes)} | rows)
    rows = {name: row for name, row in read_json(file).items() if name != "host"}
    failed = [f"{name}: {row['note'][:150]}" for name, row in rows.items() if "errors" not in row]
    return "; ".join([f"{len(rows) - len(failed)} of {len(rows)} variants ran", *failed])


def _machine(outcomes: Sequence[EngineOutcome]) -> dict[str, str]:
    ran = next((outcome for outcome in outcomes if outcome.device), None)
    library, _, version = (ran.library if ran else "").partition(" ")
    return {"gpu": ran.device if ran else "", "library": library, "version": version}


def _row(outcome: EngineOutcome, original: Model, expected: dict[str, Array]) -> dict[str, Any]:
    if not outcome.ran:
        return {"note": outcome.problem}
    row: dict[str, Any] = {"errors": errors(original, expected, outcome.values(0))}
    if outcome.latency is not None:
        row["latency_us"] = round(outcome.latency.median_us, 1)
        row["spread_us"] = round(outcome.latency.iqr_us, 1)
        row["cuda_graph"] = outcome.latency.cuda_graph
    return row
