"""One engine on the GPU with torch's buffers: built, loaded, run, timed. Run as a script it builds, with or without a GPU.

python benchmarks/gpu.py MODEL.onnx MODEL.engine
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

try:
    import tensorrt as trt
except ImportError:
    import tensorrt_rtx as trt  # type: ignore[import-not-found, no-redef]

LOGGER = trt.Logger(trt.Logger.ERROR)
WARM_UP = 3


def build(model: Path, engine: Path) -> None:
    """Build a strongly typed engine into a file. Without a GPU: for compute capability 8.0 (TensorRT-RTX alone can)."""
    builder = trt.Builder(LOGGER)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, LOGGER)
    if not parser.parse_from_file(str(model)):
        raise SystemExit(f"parser: {parser.get_error(0).desc()}")
    config = builder.create_builder_config()
    if not Path("/dev/nvidiactl").exists() and hasattr(config, "set_compute_capability"):
        config.num_compute_capabilities = 1
        config.set_compute_capability(trt.ComputeCapability.SM80, 0)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise SystemExit("the builder returned nothing")
    engine.write_bytes(plan)


class Engine:
    """A built engine with its buffers on the GPU."""

    def __init__(self, path: Path, feeds: dict[str, np.ndarray]) -> None:
        import torch

        self.torch = torch
        types = {
            trt.float32: torch.float32,
            trt.float16: torch.float16,
            trt.int64: torch.int64,
            trt.int32: torch.int32,
            trt.bool: torch.bool,
        }
        self.runtime = trt.Runtime(LOGGER)
        self.engine = self.runtime.deserialize_cuda_engine(path.read_bytes())
        if self.engine is None:
            raise RuntimeError("the engine does not load")
        self.context = self.engine.create_execution_context()
        self.stream = torch.cuda.Stream()
        self.buffers: dict[str, Any] = {}
        for index in range(self.engine.num_io_tensors):
            name = self.engine.get_tensor_name(index)
            dtype = types[self.engine.get_tensor_dtype(name)]
            if name in feeds:
                buffer = torch.from_numpy(np.ascontiguousarray(feeds[name])).to("cuda", dtype)
            else:
                buffer = torch.zeros(tuple(self.engine.get_tensor_shape(name)), dtype=dtype, device="cuda")
            self.buffers[name] = buffer
            self.context.set_tensor_address(name, buffer.data_ptr())
        torch.cuda.synchronize()
        self.graph = self._capture()

    def _capture(self) -> Any:
        """A CUDA graph of one run, so that latency is arithmetic and not launches; None if it cannot be captured."""
        for _ in range(WARM_UP):
            self.run()
        self.torch.cuda.synchronize()
        graph = self.torch.cuda.CUDAGraph()
        try:
            with self.torch.cuda.graph(graph, stream=self.stream):
                self.run()
        except RuntimeError:
            return None
        return graph

    def run(self) -> None:
        self.context.execute_async_v3(self.stream.cuda_stream)

    def outputs(self, names: list[str]) -> dict[str, np.ndarray]:
        self.run()
        self.torch.cuda.synchronize()
        return {name: self.buffers[name].cpu().numpy() for name in names}

    def time_us(self) -> float:
        """Microseconds of one run, by CUDA events."""
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        with self.torch.cuda.stream(self.stream):
            start.record()
            self.graph.replay() if self.graph is not None else self.run()
            end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1000.0


if __name__ == "__main__":
    build(*map(Path, sys.argv[1:3]))
