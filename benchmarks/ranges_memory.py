"""Cost of measuring ranges: time against a plain run, and peak memory, each model in its own process.

    python benchmarks/ranges_memory.py DIR/nafnet.onnx DIR/swin.onnx --samples 4 --json ranges.json

The data of each model is next to it: MODEL.npz, or a folder MODEL with one .npz file for each sample, as
models/build.py writes them. Peak memory is that of the whole process, including the loading of the model.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

COLUMNS = ("model", "tensors", "create_s", "sample_s", "plain_s", "loaded_mib", "peak_mib")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measured(arguments.models[0], arguments.samples)))
        return
    rows = [in_child(path, arguments.samples) for path in arguments.models]
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|")
    for row in rows:
        print("| " + " | ".join(str(row[column]) for column in COLUMNS) + " |")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


def in_child(path: Path, samples: int) -> dict[str, Any]:
    command = [sys.executable, __file__, str(path), "--samples", str(samples), "--child"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    row: dict[str, Any] = json.loads(output)
    return row


def measured(path: Path, count: int) -> dict[str, Any]:
    """Figures of one model; `create_s` is the extra time of the first sample over the others (one sample: 0)."""
    from rewriter.data.inputs import load_samples
    from rewriter.data.ranges import measure
    from rewriter.emulation import reference
    from rewriter.engines.onnxruntime import Session
    from rewriter.model import facts, load

    original = load(path)
    data = path.with_suffix("") if path.with_suffix("").is_dir() else path.with_suffix(".npz")
    samples = load_samples(data, original)
    model = reference(original, facts.infer(original))
    known = facts.infer(model)
    loaded = peak_mib()
    times = [time.perf_counter()]
    found = measure(
        model, islice(samples, count), known, progress=lambda done: times.append(time.perf_counter())
    )
    peak = peak_mib()
    steps = [b - a for a, b in pairwise(times)]
    later = sorted(steps[1:] or steps)[len(steps[1:]) // 2]
    return {
        "model": path.stem,
        "tensors": len(found),
        "create_s": round(steps[0] - later, 2),
        "sample_s": round(later, 2),
        "plain_s": round(plain_seconds(Session(model), next(iter(samples))), 2),
        "loaded_mib": loaded,
        "peak_mib": peak,
    }


def plain_seconds(session: Any, feeds: Any) -> float:
    """The faster of two runs without statistics."""
    times = []
    for _ in range(2):
        start = time.perf_counter()
        session.run(feeds)
        times.append(time.perf_counter() - start)
    return min(times)


def peak_mib() -> int:
    """Peak resident memory of this process; Linux counts it in KiB, macOS in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak >> (20 if sys.platform == "darwin" else 10)


if __name__ == "__main__":
    main()
