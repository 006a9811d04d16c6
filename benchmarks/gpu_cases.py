"""The case models on a real GPU: FP32, naive FP16 and `rewriter fix`, each built, run, compared and timed.

    python benchmarks/gpu_cases.py FOLDER [NAME ...] [--json FILE]

FOLDER holds NAME.onnx beside NAME.npz or NAME/0.npz (models/build.py writes both). Needs a GPU,
tensorrt or tensorrt-rtx, and torch for its buffers. The reference is ONNX Runtime on the CPU in
FP32; the FP32 engine runs with TF32 as TensorRT does by default. Latency: median over CUDA events of
single replays of a CUDA graph, all variants of a model interleaved in one process.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from onnx import TensorProto

import rewriter
from rewriter import facts, verify
from rewriter.compare import compare
from rewriter.emulation import emulation
from rewriter.model import Array, Model, load
from rewriter.presets import PRESETS
from rewriter.retype import Request, retype

try:
    import tensorrt as trt
except ImportError:
    import tensorrt_rtx as trt  # type: ignore[import-not-found, no-redef]

LOGGER = trt.Logger(trt.Logger.ERROR)
DTYPES = {
    trt.float32: torch.float32,
    trt.float16: torch.float16,
    trt.int64: torch.int64,
    trt.int32: torch.int32,
    trt.bool: torch.bool,
}


@dataclass
class Row:
    """One variant of one model. Errors are the worst output's relative L2; latency in microseconds."""

    model: str
    variant: str
    built: bool
    error: float | None = None
    emulated_error: float | None = None
    latency_us: float | None = None
    spread_us: float | None = None
    fp32_nodes: int | None = None
    note: str = ""


class Engine:
    """A built engine with its buffers on the GPU."""

    def __init__(self, model: Model, feeds: dict[str, Array]) -> None:
        builder = trt.Builder(LOGGER)
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(network, LOGGER)
        if not parser.parse(model.whole().SerializeToString()):
            raise RuntimeError(str(parser.get_error(0)))
        config = builder.create_builder_config()
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise RuntimeError("the builder returned nothing")
        self.runtime = trt.Runtime(LOGGER)
        self.engine = self.runtime.deserialize_cuda_engine(plan)
        self.context = self.engine.create_execution_context()
        self.stream = torch.cuda.Stream()
        self.buffers: dict[str, Any] = {}
        for index in range(self.engine.num_io_tensors):
            name = self.engine.get_tensor_name(index)
            dtype = DTYPES[self.engine.get_tensor_dtype(name)]
            if name in feeds:
                buffer = torch.from_numpy(np.ascontiguousarray(feeds[name])).to("cuda", dtype)
            else:
                buffer = torch.zeros(tuple(self.engine.get_tensor_shape(name)), dtype=dtype, device="cuda")
            self.buffers[name] = buffer
            self.context.set_tensor_address(name, buffer.data_ptr())

        self.graph = self._capture()

    def _capture(self) -> Any:
        """A CUDA graph of one run, so that latency is arithmetic and not launches; None if it cannot be captured."""
        for _ in range(3):
            self.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self.stream):
                self.run()
        except RuntimeError:
            return None
        return graph

    def run(self) -> None:
        self.context.execute_async_v3(self.stream.cuda_stream)

    def outputs(self, names: list[str]) -> dict[str, Array]:
        self.run()
        torch.cuda.synchronize()
        return {name: self.buffers[name].cpu().numpy() for name in names}

    def time_us(self) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.stream):
            start.record()
            self.graph.replay() if self.graph is not None else self.run()
            end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1000.0


def naive(model: Model) -> Model:
    """Everything FP16, as a blind conversion does it."""
    wanted = Request(lambda _scope, _node: TensorProto.FLOAT16, TensorProto.FLOAT16)
    return retype(model, facts.infer(model), wanted)


def worst_error(expected: dict[str, Array], actual: dict[str, Array]) -> float:
    rows = compare(expected, {n: a.astype(expected[n].dtype) for n, a in actual.items()}, 1e-2, as_sets=True)
    return max((r.relative_l2 if r.finite else float("inf")) for r in rows)


def measure(folder: Path, name: str) -> list[Row]:
    """All variants of one model."""
    path = folder / f"{name}.onnx"
    data = next(p for p in (folder / f"{name}.npz", folder / name / "0.npz") if p.exists())
    samples = folder / name if (folder / name).is_dir() else data
    with np.load(data) as archive:
        feeds = dict(archive)
    original = load(path)
    (expected,) = verify.expected_outputs(original, [feeds]).exact
    structural = rewriter.fix(path, precision="fp32", inputs=samples, verify=False).model
    result = rewriter.fix(path, inputs=samples, build=False)
    variants = {"fp32": structural, "fix": result.model}
    plans = {"fix": result.plan}
    if "trt-fp16-rescaled" in PRESETS:
        rescaled = rewriter.fix(path, inputs=samples, preset="trt-fp16-rescaled", verify=False)
        if any(step.name == "rescale" and step.changes for step in rescaled.passes):
            variants["fix, rescaled"], plans["fix, rescaled"] = rescaled.model, rescaled.plan
    rows, engines = [], {}
    try:
        variants["naive fp16"] = naive(structural)
    except rewriter.RewriterError as error:
        rows.append(Row(name, "naive fp16", False, note=str(error).splitlines()[0][:120]))
    for variant, model in variants.items():
        row = Row(name, variant, False)
        rows.append(row)
        try:
            engines[variant] = engine = Engine(model, feeds)
            row.built = True
            row.error = worst_error(expected, engine.outputs(list(expected)))
            if variant != "fp32":
                (emulated,) = verify.run_all(emulation(model, facts.infer(model)), [feeds])
                row.emulated_error = worst_error(expected, emulated)
        except Exception as error:
            row.note = str(error).splitlines()[0][:160]
    for row in rows:
        plan = plans.get(row.variant)
        row.fp32_nodes = len(plan.decisions) if plan is not None else None
    times: dict[str, list[float]] = {variant: [] for variant in engines}
    for round_ in range(120):
        for variant, engine in engines.items():
            elapsed = engine.time_us()
            if round_ >= 20:
                times[variant].append(elapsed)
    for row in rows:
        if times.get(row.variant):
            row.latency_us = round(statistics.median(times[row.variant]), 1)
            quarters = statistics.quantiles(times[row.variant], n=4)
            row.spread_us = round(quarters[2] - quarters[0], 1)
    return rows


def main() -> None:
    """Measure the named models, or all in the folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    names = arguments.names or sorted(p.stem for p in arguments.folder.glob("*.onnx"))
    rows: list[Row] = []
    for name in names:
        try:
            rows += measure(arguments.folder, name)
        except Exception as error:
            rows.append(
                Row(name, "-", False, note=f"{type(error).__name__}: {str(error).splitlines()[0][:160]}")
            )
        if arguments.json:
            host = {"gpu": torch.cuda.get_device_name(), "library": trt.__name__, "version": trt.__version__}
            arguments.json.write_text(json.dumps({"host": host, "rows": [asdict(r) for r in rows]}, indent=1))
    print(
        "| model | variant | error | emulated | us | +- | FP32 nodes | note |\n|---|---|---|---|---|---|---|---|"
    )
    for r in rows:
        shown = [
            "" if v is None else (f"{v:.2g}" if isinstance(v, float) and v < 1 else str(v))
            for v in (r.error, r.emulated_error, r.latency_us, r.spread_us, r.fp32_nodes)
        ]
        print(f"| {r.model} | {r.variant} | " + " | ".join(shown) + f" | {r.note} |")


if __name__ == "__main__":
    main()
