"""`fix` on networks with trained weights and real inputs: errors and latencies on a GPU, beside AutoCast and FP32.

    python benchmarks/trained_inputs.py FOLDER      # in an environment of its own: NAME.onnx, NAME/tool, NAME/kept
    python benchmarks/trained.py FOLDER OUT.json [NAME ...]    # on a GPU: makes all variants, runs and times them in turn

Each network is judged on four samples that no tool saw: an error is that of all of them as one array. `plain` is the preset trt11-migrate; `rules` is the default plan as
the rules make it, `fix` what is handed out after it was checked and repaired on the GPU. FOLDER/autocast/NAME.onnx is
AutoCast's file, if there is one: `variants.py autocast` makes it, with the first of the tool's samples.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.comparison import errors
from rewriter.ir.model import Array, Model, load
from rewriter.judge.expected import expected_outputs
from rewriter.runtime.engines import this_machine
from rewriter.runtime.engines.measure import measure
from rewriter.runtime.engines.protocol import MeasureSettings, Variant
from rewriter.runtime.engines.tensor_files import write_samples
from rewriter.runtime.inputs import load_samples

TARGET = ["--target", "tensorrt-rtx"]
VARIANTS: dict[str, list[str]] = {
    "plain": ["--preset", "trt11-migrate", "--no-verify", *TARGET],
    "rules": ["--no-verify", *TARGET],
    "accurate": ["--preset", "accurate", "--no-verify", *TARGET],
    "fix": [*TARGET],
}

KEPT = 4
"""Samples that judge."""

LIMIT_S = 300
"""Seconds of one run of `fix`."""

OTHER_PARTS = ("cpu", "result", "engine_results", "emulated")
"""What trained_cpu.py, trained_results.py and trained_agreement.py measured; it stays."""


def make(model: Path, folder: Path, name: str, arguments: list[str]) -> dict[str, Any]:
    """Runs `rewriter fix` for one variant."""
    out, start = folder / f"{name}.onnx", time.perf_counter()
    extra = [text.replace("{folder}", str(folder)) for text in arguments]
    command = [sys.executable, "-m", "rewriter", "fix", str(model), "-o", str(out), "-q", *extra]
    try:
        done = subprocess.run(
            [*command, "--inputs", str(model.with_suffix("") / "tool")],
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return {"exit": None, "said": f"not finished in {LIMIT_S} s"}
    line = (done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or [""])[-1]
    return {"exit": done.returncode, "said": line, "seconds": round(time.perf_counter() - start, 1)}


def prepare(model: Path, work: Path) -> dict[str, Any]:
    """All variants of one network."""
    folder = work / model.stem
    folder.mkdir()
    made = {name: make(model, folder, name, arguments) for name, arguments in VARIANTS.items()}
    rival = model.parent / "autocast" / model.name
    if rival.exists():
        shutil.copy(rival, folder / "autocast.onnx")
        made["autocast"] = {}
    return made


def run(model: Path, work: Path, made: dict[str, Any]) -> dict[str, Any]:
    """Errors and latencies of all variants that were made."""
    original, folder = load(model), work / model.stem
    samples, expected = kept(model, original)
    stored = write_samples(folder / "sample", samples)
    paths = {name: folder / f"{name}.onnx" for name in made}
    variants = [Variant("fp32", model, stored)]
    variants += [Variant(name, path, stored) for name, path in paths.items() if path.exists()]
    engine = this_machine.choose().engine
    assert engine is not None, "this needs a GPU"
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as outputs:
        for outcome in measure(variants, MeasureSettings(engine), Path(outputs)):
            row: dict[str, Any] = dict(made.get(outcome.variant, {}))
            if outcome.ran and outcome.latency is not None:
                values = [outcome.values(i) for i in range(len(samples))]
                row |= {"us": round(outcome.latency.median_us, 1)} | judged(original, expected, values)
            else:
                row["problem"] = outcome.problem
            rows[outcome.variant] = row
    return rows


def kept(model: Path, original: Model) -> tuple[list[dict[str, Array]], list[dict[str, Array]]]:
    """The samples that judge, and the original's outputs for them."""
    samples = list(islice(load_samples(str(model.with_suffix("") / "kept"), original), KEPT))
    return samples, [dict(exact) for exact in expected_outputs(original, samples).exact]


def judged(
    original: Model, expected: list[dict[str, Array]], outputs: Sequence[dict[str, Array]]
) -> dict[str, Any]:
    """Relative L2 errors of the outputs over all samples, the worst of them, and the worst of each sample."""
    alone = [errors(original, exact, found) for exact, found in zip(expected, outputs, strict=True)]
    pooled: dict[str, float | None] = {}
    for name in alone[0]:
        found = [one[name] for one in alone]
        norms = [float(np.linalg.norm(exact[name].astype(np.float64))) for exact in expected]
        squares = [(e * n) ** 2 for e, n in zip(found, norms, strict=True) if e is not None]
        known = len(squares) == len(found)
        pooled[name] = math.sqrt(sum(squares) / max(sum(n**2 for n in norms), 1e-300)) if known else None
    worst = [max((e for e in one.values() if e is not None), default=None) for one in alone]
    finite = all(error is not None for error in pooled.values())
    error = max((e for e in pooled.values() if e is not None), default=None)
    return {"errors": pooled, "error": error, "samples": worst, "finite": finite}


def main(folder: Path, out: Path, names: list[str]) -> None:
    models = [model for model in sorted(folder.glob("*.onnx")) if not names or model.stem in names]
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        with ThreadPoolExecutor(6) as pool:
            made = dict(zip(models, pool.map(lambda m: prepare(m, work), models), strict=True))
        found = json.loads(out.read_text()) if out.exists() else {}
        for model in models:
            try:
                rows = run(model, work, made[model])
            except Exception as error:  # one network must not stop the others
                rows = {"problem": f"{type(error).__name__}: {error}"}
            others = {key: found.get(model.stem, {}).get(key) for key in OTHER_PARTS}
            found[model.stem] = rows | {key: row for key, row in others.items() if row}
            out.write_text(json.dumps(found, indent=1) + "\n")
            line = [
                f"{n} {r.get('us', '-')} us {r.get('error') or 0:.2e}"
                for n, r in rows.items()
                if isinstance(r, dict)
            ]
            print(model.stem, "|", "; ".join(line), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
