"""The first stage of side_by_side.py, which needs no GPU: makes, counts and emulates each variant.

Every step is a child process with its own time and memory. A tool that crashes, or is stopped at a limit, becomes a row
with a note. Existing results, notes included, are not made again: a stage that was stopped continues where it was.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.census import census
from benchmarks.children import Limits, child
from benchmarks.comparison import Case, errors, feeds_of, read_json, write_json
from benchmarks.variants import EFFORT, FOREIGN
from rewriter.emulation import Accumulation, emulation
from rewriter.errors import RewriterError
from rewriter.model import facts, load
from rewriter.verification.expected import as_declared, expected_outputs, run_all

CHECK_FAILED = 1
"""Exit code of `rewriter fix` for a model that it wrote although a check failed; such a model is a variant, too."""


@dataclass(frozen=True)
class Tools:
    """Tools that make variants, and settings of the emulation.

    Attributes:
        python: Interpreter with the other tools.
        accumulations: Types in which emulated FP16 products sum.
        limits: For one child process, either a tool or an emulation.
    """

    python: str
    accumulations: Sequence[str]
    limits: Limits


def prepare_all(cases: Sequence[Case], variants: Sequence[str], tools: Tools, jobs: int) -> None:
    """Prepares all variants of all models in one pool of jobs, the longest expected jobs first.

    A model's cost is the time of its FP32 run; a variant's is `EFFORT` times that.
    """
    started = time.perf_counter()
    with ThreadPoolExecutor(jobs) as pool:
        ready = [case for case, fine in zip(cases, pool.map(_expect, cases), strict=True) if fine]
        chains = sorted(((case, name) for case in ready for name in variants), key=lambda c: -_cost(*c))
        running = {pool.submit(_chain, case, name, tools): case for case, name in chains}
        left = Counter(case.name for case in running.values())
        for future in as_completed(running):
            case = running[future]
            left[case.name] -= 1
            if not left[case.name]:
                print(f"{_summary(case, variants)}; {time.perf_counter() - started:.0f} s", flush=True)


def _expect(case: Case) -> bool:
    """Computes the original's outputs in a process of its own; returns True if they exist."""
    try:
        case.work.mkdir(parents=True, exist_ok=True)
        case.hold_out()
        if not (case.work / "expected.npz").exists():
            ran = _step(case, Limits(), "expect")
            if ran["exit_code"]:
                print(f"{case.name}: no expected outputs: {ran['note']}", flush=True)
                return False
            write_json(case.work / "expected.json", ran)
    except (RewriterError, OSError) as error:
        print(f"{case.name}: {error}", flush=True)
        return False
    return True


def _cost(case: Case, name: str) -> float:
    seconds = float(read_json(case.work / "expected.json").get("wall_s", 0.0))
    return seconds * EFFORT.get(name, 1.0)


def _chain(case: Case, name: str, tools: Tools) -> None:
    """Prepares one variant; an error outside its child processes is reported and stops nothing else."""
    try:
        prepare_variant(case, name, tools)
    except Exception as error:
        print(f"{case.name} {name}: {type(error).__name__}: {error}", flush=True)


def _summary(case: Case, variants: Sequence[str]) -> str:
    """One line: the number of variants made, and the failures."""
    rows = {name: read_json(case.work / f"{name}.json") for name in variants}
    made = sum(bool(row.get("made")) for row in rows.values())
    failed = [f"{name}: {note}" for name, row in rows.items() if (note := note_of(row))]
    return "; ".join([f"{case.name}: {made} of {len(rows)} variants made", *failed])


def note_of(row: dict[str, Any]) -> str:
    """The first failure of a variant before its build; "" if there was none."""
    steps = [row.get(key, {}) for key in ("tool", "counted", "emulated_fp16", "emulated_fp32")]
    return next((str(step["note"]) for step in steps if step.get("note")), "")


def prepare_variant(case: Case, name: str, tools: Tools, extra: Sequence[str] = ()) -> None:
    """Makes, counts and emulates one variant; `extra` are more arguments for its tool."""
    out, stats = case.work / f"{name}.onnx", case.work / f"{name}.json"
    row = read_json(stats)
    if "tool" not in row:
        out.unlink(missing_ok=True)
        command = [tools.python if name in FOREIGN else sys.executable, "benchmarks/variants.py", name]
        command += [str(case.path), str(case.calibration), str(out), *extra]
        row["tool"] = child(command, case.work / f"{name}.log", tools.limits)
        fine = (0,) if name in FOREIGN else (0, CHECK_FAILED)
        row["made"] = out.exists() and row["tool"]["exit_code"] in fine
        write_json(stats, row)
    if not row["made"]:
        return
    if "fp32_nodes" not in row and "counted" not in row:
        _noted(case, tools.limits, name, "counted", "count", name)
    for accumulation in tools.accumulations if name != "fp32" else ():
        if f"emulated_{accumulation}" not in row:
            _noted(case, tools.limits, name, f"emulated_{accumulation}", "emulate", name, accumulation)


def _noted(case: Case, limits: Limits, variant: str, key: str, *step: str) -> None:
    """Runs a step that writes into a variant's row; if the step fails, its note is written under `key`."""
    ran = _step(case, limits, *step)
    if ran["exit_code"]:
        stats = case.work / f"{variant}.json"
        write_json(stats, read_json(stats) | {key: {"note": f"{' '.join(step)}: {ran['note']}"}})


def _step(case: Case, limits: Limits, *step: str) -> dict[str, Any]:
    """Runs a step of this file in a child process."""
    command = [sys.executable, str(Path(__file__)), *step[:1], str(case.path), str(case.samples)]
    log = case.work / f"{'-'.join(step)}.log"
    return child([*command, str(case.work), *step[1:]], log, limits)


def expect(case: Case) -> None:
    """Writes the original's outputs, in FP32 on ONNX Runtime's CPU."""
    (outputs,) = expected_outputs(load(case.path), [feeds_of(case.samples)]).exact
    part = case.work / "part.npz"
    np.savez(part, **outputs)  # type: ignore[arg-type]
    part.replace(case.work / "expected.npz")


def count(case: Case, name: str) -> None:
    stats = case.work / f"{name}.json"
    write_json(stats, read_json(stats) | asdict(census(onnx.load(case.work / f"{name}.onnx"))))


def emulate(case: Case, name: str, accumulation: Accumulation) -> None:
    with np.load(case.work / "expected.npz") as archive:
        expected = dict(archive)
    model = load(case.work / f"{name}.onnx")
    start = time.perf_counter()
    (outputs,) = run_all(
        emulation(model, facts.infer(model), accumulation, tf32=True),
        [as_declared(model, feeds_of(case.samples))],
    )
    found = {
        "errors": errors(model, expected, outputs),
        "seconds": round(time.perf_counter() - start, 1),
    }
    stats = case.work / f"{name}.json"
    write_json(stats, read_json(stats) | {f"emulated_{accumulation}": found})


if __name__ == "__main__":
    step, *paths = sys.argv[1:5]
    {"expect": expect, "count": count, "emulate": emulate}[step](Case(*map(Path, paths)), *sys.argv[5:])
