"""Compares the emulation, with FP32 and FP16 accumulators, with engines on an H200.

    python benchmarks/emulation_cases.py FOLDER [NAME ...] [--json FILE]

FOLDER as for side_by_side.py. The engines' side is gpu_cases.json, recorded on one H200. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np

import rewriter
from rewriter.emulation import Accumulation, emulation
from rewriter.figures.outputs import compare
from rewriter.model import Array, Model, facts, load
from rewriter.verification.expected import expected_outputs, run_all

ENGINES = Path(__file__).with_name("gpu_cases.json")


def worst_error(expected: dict[str, Array], actual: dict[str, Array]) -> float:
    rows = compare(expected, {n: a.astype(expected[n].dtype) for n, a in actual.items()}, 1e-2, as_sets=True)
    return max((r.relative_l2 if r.finite else math.inf) for r in rows)


def emulated(
    model: Model, feeds: dict[str, Array], accumulation: Accumulation
) -> tuple[dict[str, Array], float]:
    start = time.perf_counter()
    (outputs,) = run_all(emulation(model, facts.infer(model), accumulation), [feeds])
    return outputs, time.perf_counter() - start


def measure(folder: Path, name: str, engine: dict[str, Any]) -> dict[str, Any]:
    path = folder / f"{name}.onnx"
    data = next(p for p in (folder / f"{name}.npz", folder / name / "0.npz") if p.exists())
    with np.load(data) as archive:
        feeds = dict(archive)
    (expected,) = expected_outputs(load(path), [feeds]).exact
    fixed = rewriter.fix(path, inputs=folder / name if (folder / name).is_dir() else data, verify=False).model
    row: dict[str, Any] = {"model": name, "engine_error": engine["error"]}
    for accumulation in ("fp32", "fp16"):
        outputs, seconds = emulated(fixed, feeds, accumulation)
        error = worst_error(expected, outputs)
        row |= {f"error_{accumulation}": error, f"seconds_{accumulation}": round(seconds, 1)}
        row[f"ratio_{accumulation}"] = round(error / engine["error"], 2)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    engines = {r["model"]: r for r in json.loads(ENGINES.read_text())["rows"] if r["variant"] == "fix"}
    rows = []
    for name in arguments.names or sorted(engines):
        rows.append(measure(arguments.folder, name, engines[name]))
        print(rows[-1], flush=True)
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
