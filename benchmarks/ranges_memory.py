"""Cost of measuring ranges: time against a plain run, and peak memory, each model in its own process.

    python benchmarks/ranges_memory.py DIR/nafnet.onnx DIR/swin.onnx --samples 4 --json ranges.json
    python benchmarks/ranges_memory.py --encoder 12 [--no-build] --json large_weights.json

With `--encoder N` it is the cost of `rewriter fix` on a Transformer encoder of N layers instead. Each layer has
192 MiB of FP32 weights in external data (12 layers: 2.25 GiB, 40: 7.5 GiB), and decomposed norms. Its memory is
PSS, summed over the process and its children five times a second (Linux). Pages of mapped weights count; those
that forks share count once. `private` is without pages of files, which the system may drop.

The data of each model is next to it: MODEL.npz, or a folder MODEL with one .npz file for each sample, as
models/build.py writes them. Peak memory is that of the whole process, including the loading of the model.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

COLUMNS = ("model", "tensors", "create_s", "sample_s", "plain_s", "loaded_mib", "peak_mib")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--encoder", type=int, metavar="N", help="measure fix on an encoder of N layers")
    parser.add_argument("--no-build", action="store_true", help="of fix")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measured(arguments.models[0], arguments.samples)))
        return
    if arguments.encoder:
        rows = [fixed(arguments.encoder, build=not arguments.no_build)]
    else:
        rows = [in_child(path, arguments.samples) for path in arguments.models]
    columns = list(rows[0]) if rows else COLUMNS
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for row in rows:
        print("| " + " | ".join(str(row[column]) for column in columns) + " |")
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


# -- fix with large weights ------------------------------------------------------------------------

WIDTH, TOKENS, HEADS = 2048, 64, 16

LAYER = """
    @.m = ReduceMean <axes = [-1]> (@)
    @.d = Sub (@, @.m)
    @.q = Mul (@.d, @.d)
    @.v = ReduceMean <axes = [-1]> (@.q)
    @.e = Add (@.v, eps)
    @.s = Sqrt (@.e)
    @.n = Div (@.d, @.s)
    @.qp = MatMul (@.n, @.wq)
    @.kp = MatMul (@.n, @.wk)
    @.vp = MatMul (@.n, @.wv)
    @.qr = Reshape (@.qp, split)
    @.kr = Reshape (@.kp, split)
    @.vr = Reshape (@.vp, split)
    @.qt = Transpose <perm = [0, 2, 1, 3]> (@.qr)
    @.kt = Transpose <perm = [0, 2, 3, 1]> (@.kr)
    @.vt = Transpose <perm = [0, 2, 1, 3]> (@.vr)
    @.l = MatMul (@.qt, @.kt)
    @.ls = Mul (@.l, scale)
    @.a = Softmax <axis = -1> (@.ls)
    @.c = MatMul (@.a, @.vt)
    @.ct = Transpose <perm = [0, 2, 1, 3]> (@.c)
    @.cr = Reshape (@.ct, joined)
    @.o = MatMul (@.cr, @.wo)
    @.r = Add (@, @.o)
    @.u = MatMul (@.r, @.wu)
    @.g = Relu (@.u)
    @.w = MatMul (@.g, @.wd)
    $ = Add (@.r, @.w)
"""
"""Nodes of a layer: `@` is its input, `$` its output."""


def encoder(folder: Path, layers: int) -> Path:
    """Writes an encoder with random weights of unit gain; one layer's weights are in memory at a time."""
    import numpy as np
    import onnx.parser

    names = [*(f"h{i}" for i in range(layers)), "y"]
    body = "".join(LAYER.replace("@", before).replace("$", after) for before, after in pairwise(names))
    size = f"float[1,{TOKENS},{WIDTH}]"
    scale = (WIDTH / HEADS) ** -0.5
    constants = (
        f"float eps = {{0.00001}}, float scale = {{{scale}}}, int64[4] split = {{0, 0, {HEADS}, {WIDTH // HEADS}}}, "
        f"int64[3] joined = {{0, 0, {WIDTH}}}"
    )
    # a dot is no part of a name in this text
    text = f"g ({size} h0) => ({size} y) <{constants}> {{ {body.replace('.', '_')} }}"
    proto = onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 17]>' + text)
    path, rng = folder / "encoder.onnx", np.random.default_rng(0)
    shapes = dict.fromkeys(("wq", "wk", "wv", "wo"), (WIDTH, WIDTH))
    shapes |= {"wu": (WIDTH, 4 * WIDTH), "wd": (4 * WIDTH, WIDTH)}
    with (folder / "encoder.data").open("wb") as data:
        for layer in names[:-1]:
            for name, shape in shapes.items():
                weight = rng.standard_normal(shape, np.float32) * np.float32(shape[0] ** -0.5)
                tensor = proto.graph.initializer.add(name=f"{layer}_{name}", data_type=1, dims=shape)
                tensor.data_location = onnx.TensorProto.EXTERNAL
                for key, value in (("location", "encoder.data"), ("offset", data.tell())):
                    tensor.external_data.add(key=key, value=str(value))
                data.write(weight.data)
    path.write_bytes(proto.SerializeToString())
    return path


def fixed(layers: int, *, build: bool) -> dict[str, Any]:
    """Seconds and peak memory of `rewriter fix`, and of all of its children."""
    with tempfile.TemporaryDirectory() as scratch:
        path = encoder(Path(scratch), layers)
        gib = (path.parent / "encoder.data").stat().st_size / 2**30
        command = [sys.executable, "-m", "rewriter", "fix", str(path), "-o", f"{scratch}/fixed.onnx", "-q"]
        start, peak, private = time.perf_counter(), 0, 0
        with subprocess.Popen(command if build else [*command, "--no-build"], stdout=sys.stderr) as process:
            while process.poll() is None:
                found = [pss(relative) for relative in relatives(process.pid)]
                peak = max(peak, sum(one["Pss"] for one in found))
                private = max(private, sum(one["Pss"] - one["Pss_File"] for one in found))
                time.sleep(0.2)
        wall = time.perf_counter() - start
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "layers": layers,
        "weights_gib": round(gib, 2),
        "build": build,
        "exit_code": process.returncode,
        "wall_s": round(wall, 1),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_gib": round(peak / 2**20, 2),
        "private_gib": round(private / 2**20, 2),
    }


def relatives(root: int) -> list[int]:
    """A process and its descendants."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [root]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def pss(process: int) -> dict[str, int]:
    """Memory of a process in KiB, with its share of what others have, too (proc_pid_smaps(5))."""
    found = {"Pss": 0, "Pss_File": 0}
    with suppress(OSError):
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.partition(":")[0] in found:
                found[line.partition(":")[0]] = int(line.split()[1])
    return found


if __name__ == "__main__":
    main()
