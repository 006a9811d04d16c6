"""Latency of a Conv by its channels, window and groups, in chains of six equal ones with Relu in FP16.

    python benchmarks/conv_kernels.py OUT.json      # on a GPU

Measures the chains of conv_kernels.json, CHANNELS:WINDOW:SIDE:GROUPS: us of one Conv, and the chain's error against FP32.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rewriter.ir.model import load
from rewriter.runtime.engines.measure import measure
from rewriter.runtime.engines.protocol import MeasureSettings, Timing, Variant
from rewriter.runtime.engines.tensor_files import write_samples
from rewriter.verification.expected import expected_outputs

LENGTH = 6


def chain(channels: int, window: int, side: int, groups: int) -> onnx.ModelProto:
    """Convs of random weights that keep the size of their input; joined groups have no zeros here."""
    draw, shape = np.random.default_rng(0), (channels, channels // groups, window, window)
    conv = f"Conv<group = {groups}, pads = [{', '.join([str(window // 2)] * 4)}]>"
    port = f"float16[1,{channels},{side},{side}]"
    lines = " ".join(f"c{n} = {conv}(x{n}, w{n}) x{n + 1} = Relu(c{n})" for n in range(LENGTH))
    text = f'<ir_version: 8, opset_import: ["" : 17]> g ({port} x0) => ({port} x{LENGTH}) {{ {lines} }}'
    made = onnx.parser.parse_model(text)
    for n in range(LENGTH):
        weight = draw.standard_normal(shape) * np.sqrt(2 / np.prod(shape[1:]))
        made.graph.initializer.append(onnx.numpy_helper.from_array(weight.astype(np.float16), f"w{n}"))
    return made


def main() -> None:
    rows, jobs = dict[str, dict[str, float]](), list[tuple[Variant, np.ndarray]]()
    with tempfile.TemporaryDirectory() as place:
        for number, name in enumerate(json.loads(Path(__file__).with_suffix(".json").read_text())):
            path, sizes = Path(place) / f"{number}.onnx", [int(size) for size in name.split(":")]
            onnx.save(chain(*sizes), path)
            values = np.random.default_rng(number).standard_normal((1, sizes[0], sizes[2], sizes[2]))
            feeds = [{"x0": values.astype(np.float16)}]
            variant = Variant(name, path, write_samples(path.with_suffix(".samples"), feeds))
            jobs.append((variant, expected_outputs(load(path), feeds).exact[0][f"x{LENGTH}"]))
        settings = MeasureSettings("tensorrt-rtx", timing=Timing(5, 25))
        outcomes = measure([variant for variant, _ in jobs], settings, Path(place))
        for outcome, (_, exact) in zip(outcomes, jobs, strict=True):
            if outcome.latency is not None:
                error = np.linalg.norm(outcome.values(0)[f"x{LENGTH}"] - exact) / np.linalg.norm(exact)
                rows[outcome.variant] = {"us": outcome.latency.median_us / LENGTH, "error": float(error)}
    Path(sys.argv[1]).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
