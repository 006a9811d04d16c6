"""References and ranges of `fix` on CUDA against the CPU, and `fix` and `verify` with `--engine onnxruntime-cuda`.

    python benchmarks/cuda_reference.py FOLDER [NAME ...]      (TEN has the default names)

Needs a GPU, onnxruntime-gpu, and PyTorch and transformers for what models/build.py exports. Each `fix` is a process
of its own, with emulation alone, so that nothing but the place of references and ranges differs: `CPU` is that
with the GPU hidden, `CUDA` with it for models of any size. Prints a table and writes FOLDER/cuda_reference.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from models.build import write
from rewriter.ir.model import facts, load
from rewriter.runtime.emulation import reference
from rewriter.runtime.engines import onnxruntime
from rewriter.runtime.inputs import load_samples

TEN = ("nafnet", "vit", "swin", "rtdetr", "convnext", "resnet", "bert", "whisper_encoder", "unet", "esrgan")
SAMPLES = 3
HIDDEN = {"CUDA_VISIBLE_DEVICES": "-1"}
EVERY_SIZE = "from rewriter.runtime.engines import onnxruntime as o; o.GPU_BYTES = 0; import rewriter.cli as c; c.app()"
STAGES = ("reference", "passes", "ranges", "verify")


def command(words: list[str], report: Path, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The report of one command in a process of its own; its error where there is none."""
    report.unlink(missing_ok=True)
    started = [sys.executable, "-c", EVERY_SIZE, *words, "--json", str(report), "-q"]
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    done = subprocess.run(started, env={**os.environ, **paths, **(env or {})}, capture_output=True, text=True)
    if report.exists():
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        return found
    return {"problem": (done.stderr or done.stdout).strip().partition("\n")[0][:60]}


def differences(path: Path, inputs: Path) -> dict[str, Any]:
    """Relative L2 distance of each output of the FP32 model on CUDA from the CPU's, on the first sample."""
    model = load(path)
    wide = reference(model, facts.infer(model))
    feeds = next(iter(load_samples(inputs, model)))
    onnxruntime.GPU_BYTES = 0
    found = []
    for gpu in (True, False):
        with onnxruntime.Session(wide, gpu=gpu) as session:
            found.append({n: v.astype(np.float64) for n, v in session.run(feeds).items()})
    of = {n: np.linalg.norm(found[0][n] - v) / max(np.linalg.norm(v), 1e-30) for n, v in found[1].items()}
    return {"megabytes": round(model.size / 1e6), "outputs": of, "notes": onnxruntime.gpu_notes()}


def measured(path: Path, inputs: Path, folder: Path) -> dict[str, Any]:
    """All figures of one network."""
    name = path.stem
    fixed = folder / f"{name}.fixed.onnx"
    fix = ["fix", str(path), "--inputs", str(inputs), "-o", str(fixed)]
    alone = [*fix, "--engine", "emulation", "--no-build", "--accumulation", "fp32"]
    on_cpu = command(alone, folder / f"{name}.cpu.json", HIDDEN)
    on_gpu = command(alone, folder / f"{name}.cuda.json")
    run = command([*fix, "--engine", "onnxruntime-cuda"], folder / f"{name}.fix.json")
    verify = ["verify", str(path), str(fixed), "--inputs", str(inputs), "--engine", "onnxruntime-cuda"]
    verified = command(verify, folder / f"{name}.verify.json")
    return {
        **differences(path, inputs),
        "seconds": {"cpu": on_cpu.get("seconds", {}), "cuda": on_gpu.get("seconds", {})},
        "warnings": on_gpu.get("warnings", []),
        "fix": {c["name"]: [c["passed"], c["summary"]] for c in run.get("checks", [])} or run,
        "verify": {c["name"]: [c["passed"], c["summary"]] for c in verified.get("checks", [])} or verified,
    }


def source(name: str, folder: Path) -> tuple[Path, Path]:
    """A network and its samples: exported, or as it is committed where this PyTorch cannot export it."""
    try:
        return write(name, folder, True, SAMPLES, 5000), folder / name
    except Exception as error:
        print(f"{name}: the committed size, since its export fails: {str(error).splitlines()[0][:100]}")
        return ROOT / f"models/{name}.onnx", ROOT / f"models/{name}.npz"


def row(name: str, found: Mapping[str, Any]) -> str:
    """One line of the table: seconds as `CPU > CUDA`."""
    cpu, cuda = (found["seconds"][where] for where in ("cpu", "cuda"))
    times = [f"{cpu.get(s, 0):6.1f} >{cuda.get(s, 0):6.1f}" for s in STAGES]
    total = f"{sum(cpu.values()):6.1f} >{sum(cuda.values()):6.1f}"
    passed = [found[what].get("run", [found[what].get("problem", "no run")])[0] for what in ("fix", "verify")]
    worst = max(found["outputs"].values(), default=0.0)
    times = "  ".join([*times, total])
    return f"{name:16}{found['megabytes']:5}  {times}  {worst:8.1e}  {passed[0]} {passed[1]}"


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:] or TEN
    results: dict[str, Any] = {}
    heads = "  ".join(f"{stage:>14}" for stage in (*STAGES, "all"))
    print(f"{'network':16}{'MB':>5}  {heads}  distance  fix verify")
    for name in names:
        path, inputs = source(name, folder)
        results[name] = measured(path, inputs, folder)
        print(row(name, results[name]), flush=True)
        (folder / "cuda_reference.json").write_text(json.dumps(results, indent=1, default=float) + "\n")


if __name__ == "__main__":
    main()
