"""Latency of ConvTransposes, and of what `convtranspose-to-depth-to-space` makes of them.

    python benchmarks/convtranspose_kernels.py OUT.json [--build]      # on a GPU; --build builds engines alone

Measures the names of convtranspose_kernels.json, CHANNELS:OUT:KERNEL:STRIDE:SIZE:BATCH, with `2d` before images and `3d` before volumes: us and
the relative L2 error of plain FP16 and of `fix`, of a ConvTranspose with a bias between two Muls.
"""

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rewriter.ir.model import load
from rewriter.runtime.engines.measure import build_variant, measure
from rewriter.runtime.engines.protocol import MeasureSettings, Timing, Variant
from rewriter.runtime.engines.tensor_files import write_samples
from rewriter.verification.expected import expected_outputs

SETTINGS = MeasureSettings("tensorrt-rtx", timing=Timing(10, 60))
FORMS = {"plain": ("--preset", "trt11-migrate"), "fix": ()}


def write(name: str, folder: Path) -> np.ndarray:
    """Writes model.onnx and returns its input."""
    *kind, channels, out, kernel, step, size, batch = name.split(":")
    axes, draw = int(kind[0][0]) if kind else 1, np.random.default_rng(0)
    taps, sides = [int(kernel)] * axes, ",".join([size] * axes)
    text = f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[{batch},{channels},{sides}] x) => (float[{batch},{out},{",".join("LMO"[:axes])}] y) <float half = {{0.5}}> {{
            h = Mul(x, half) c = ConvTranspose<strides = {[int(step)] * axes}>(h, w, b) y = Mul(c, half)
        }}"""
    made = onnx.parser.parse_model(text)
    scale = np.sqrt(int(channels) * (int(kernel) / int(step)) ** axes)
    weight = draw.standard_normal((int(channels), int(out), *taps)) / scale
    for key, value in (("w", weight), ("b", 0.1 * draw.standard_normal(int(out)))):
        made.graph.initializer.append(onnx.numpy_helper.from_array(value.astype(np.float32), key))
    onnx.save(made, folder / "model.onnx")
    return draw.standard_normal([int(batch), int(channels), *[int(size)] * axes]).astype(np.float32)


def built(name: str, folder: Path) -> tuple[list[Variant], np.ndarray]:
    folder.mkdir()
    feeds = [{"x": write(name, folder)}]
    samples, variants = write_samples(folder / "samples", feeds), []
    np.savez(folder / "x.npz", **feeds[0])  # type: ignore[arg-type]
    for form, options in FORMS.items():
        path = folder / f"{form}.onnx"
        command = [sys.executable, "-m", "rewriter", "fix", str(folder / "model.onnx"), "-o", str(path), "-q"]
        command += ["--no-verify", "--inputs", str(folder / "x.npz"), "--target", "tensorrt-rtx", *options]
        subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
        variant, outcome = build_variant(Variant(form, path, samples), SETTINGS, path.with_suffix(".engine"))
        if not outcome.ran:
            raise SystemExit(f"{name}: {outcome.problem}")
        variants.append(variant)
    return variants, expected_outputs(load(folder / "model.onnx"), feeds).exact[0]["y"]


def main() -> None:
    names = list(json.loads(Path(__file__).with_suffix(".json").read_text()))
    rows = dict[str, dict[str, list[float]]]()
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(os.cpu_count()) as pool:
        folders = [Path(place) / str(number) for number in range(len(names))]
        jobs = list(pool.map(built, names, folders))
        print(f"{len(jobs)} are built", flush=True)
        for name, folder, (variants, exact) in zip(names, folders, jobs, strict=True):
            if "--build" in sys.argv:
                break
            rows[name] = {}
            for outcome in measure(variants, SETTINGS, folder / "run"):
                if outcome.latency is not None:
                    error = np.linalg.norm(outcome.values(0)["y"] - exact) / np.linalg.norm(exact)
                    rows[name][outcome.variant] = [round(outcome.latency.median_us, 2), float(f"{error:.3g}")]
            print(name, json.dumps(rows[name]), flush=True)
    Path(sys.argv[1]).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
