"""ONNX Runtime as a `Program` of the protocol, on CPU or GPU; used in child processes only."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import onnx

from rewriter.ir.errors import EngineError
from rewriter.ir.model import Array, load
from rewriter.runtime.engines import nvidia_driver
from rewriter.runtime.engines.local_session import LocalSession
from rewriter.runtime.engines.protocol import EngineLayer, RunOrder


class OnnxRuntimeProgram:
    """A session on the ONNX file; optimisations are off, so that it computes what the file says.

    Args:
        gpu: CUDAExecutionProvider instead of the CPU.
    """

    cuda_graph = False

    def __init__(self, order: RunOrder, *, gpu: bool) -> None:
        self.notes: list[str] = []
        self.device = str(nvidia_driver.first_gpu()) if gpu else "CPU"
        model = load(order.engine)
        ports = {port.name for port in model.signature.outputs}
        # a name alone is enough for ONNX Runtime, which infers the type
        model.proto.graph.output.extend(
            onnx.ValueInfoProto(name=name) for name in order.variant.outputs if name not in ports
        )
        self._session = LocalSession(model, gpu=gpu, tf32=order.variant.tf32)
        self.library = self._session.version
        if order.variant.debug:
            self.notes.append("ONNX Runtime has no unfused debug tensors")
        self._timed: Callable[[], object] | None = None

    def run(self, feeds: Mapping[str, Array], debug: Path | None = None) -> dict[str, Array]:
        """See `Program.run`."""
        return self._session.run(feeds)

    def prepare(self, feeds: Mapping[str, Array]) -> None:
        """See `Program.prepare`."""
        self._timed = self._session.bound(feeds)

    def time_us(self) -> float:
        """See `Program.time_us`: wall time until the device has finished."""
        if self._timed is None:
            raise EngineError("nothing was prepared to be timed", hint="call prepare with the feeds first")
        start = time.perf_counter()
        self._timed()
        return (time.perf_counter() - start) * 1e6

    def layers(self) -> Sequence[EngineLayer]:
        """Nothing: without optimisations they are the nodes of the file."""
        return ()

    def close(self) -> None:
        """Free the session."""
        self._timed = None
        self._session.close()
