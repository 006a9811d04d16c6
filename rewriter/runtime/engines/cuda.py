"""Memory, stream, events and graphs of the GPU, by cuda-python; used in child processes only.

`cuda.bindings.runtime` is CUDA's own API one to one, the same for CUDA 12 and 13, and needs no toolkit: a
driver is enough. (`cuda.core` would read better; its names and signatures still change between releases.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from rewriter.ir.errors import EngineError
from rewriter.ir.model import Array
from rewriter.runtime.engines import nvidia_driver

INSTALL_HINT = 'pip install "rewriter[gpu]" (cuda-bindings)'


class CudaFault(EngineError):
    """A call of CUDA failed. Most of these leave the process unable to use the GPU again."""


def runtime() -> Any:
    """Imports `cuda.bindings.runtime`, and checks that it can be used.

    Raises:
        EngineError: no GPU, no cuda-python, or a driver that is too old for it.
    """
    gpu = nvidia_driver.first_gpu()
    try:
        cudart = import_module("cuda.bindings.runtime")
    except ImportError as error:
        raise EngineError(f"cuda-python is missing: {error}", hint=INSTALL_HINT) from error
    (version,) = _checked(cudart, cudart.cudaRuntimeGetVersion())
    needed, known = version // 1000, gpu.driver_cuda
    if known[0] < needed:
        raise EngineError(
            f"the driver is too old: it knows CUDA {known[0]}.{known[1]}, cuda-bindings needs CUDA {needed}",
            hint=f"update the driver, or pip install 'cuda-bindings<{needed}'",
        )
    return cudart


def _checked(cudart: Any, answer: tuple[Any, ...]) -> tuple[Any, ...]:
    error, *values = answer
    if int(error):
        _, text = cudart.cudaGetErrorString(error)
        message = text.decode() if isinstance(text, bytes) else str(text)
        hint = "close other programs on the GPU, or use smaller samples" if "memory" in message else None
        raise CudaFault(f"CUDA: {message} ({int(error)})", hint=hint)
    return tuple(values)


class Buffer:
    """Memory on the GPU; at least one byte, for TensorRT takes no null pointer."""

    def __init__(self, stream: Stream, size: int) -> None:
        self._stream = stream
        self.size = size
        (self.pointer,) = stream.call("cudaMalloc", max(size, 1))
        self.pointer = int(self.pointer)

    def upload(self, array: Array) -> None:
        """Copy a C-contiguous array of at most `size` bytes to the GPU."""
        if array.nbytes:
            self._stream.copy(self.pointer, array.ctypes.data, array.nbytes, "cudaMemcpyHostToDevice")

    def free(self) -> None:
        if self.pointer:
            self._stream.call("cudaFree", self.pointer)
            self.pointer = 0


class Stream:
    """A stream of the first GPU, with timing and graph capture."""

    def __init__(self) -> None:
        self.cudart = runtime()
        self.call("cudaSetDevice", 0)
        (self._stream,) = self.call("cudaStreamCreateWithFlags", self.cudart.cudaStreamNonBlocking)
        (self._start,) = self.call("cudaEventCreate")
        (self._end,) = self.call("cudaEventCreate")

    @property
    def handle(self) -> int:
        return int(self._stream)

    def call(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        """Call a function of the CUDA runtime; its results without the error code.

        Raises:
            CudaFault: it failed.
        """
        return _checked(self.cudart, getattr(self.cudart, name)(*arguments))

    def wait(self) -> None:
        self.call("cudaStreamSynchronize", self._stream)

    def download(self, pointer: int, array: Array) -> None:
        """Copy from the GPU into a C-contiguous array, which is filled."""
        if array.nbytes:
            self.copy(array.ctypes.data, pointer, array.nbytes, "cudaMemcpyDeviceToHost")

    def copy(self, to: int, source: int, size: int, kind: str) -> None:
        """Copy in the order of this stream, and wait: another stream's copy would race with its kernels."""
        direction = getattr(self.cudart.cudaMemcpyKind, kind)
        self.call("cudaMemcpyAsync", to, source, size, direction, self._stream)
        self.wait()

    def elapsed_us(self, work: Callable[[], None]) -> float:
        """Time between two events round `work`, which puts something on this stream."""
        self.call("cudaEventRecord", self._start, self._stream)
        work()
        self.call("cudaEventRecord", self._end, self._stream)
        self.call("cudaEventSynchronize", self._end)
        (milliseconds,) = self.call("cudaEventElapsedTime", self._start, self._end)
        return float(milliseconds) * 1000.0

    def captured(self, work: Callable[[], None]) -> Callable[[], object]:
        """Captures the work that `work` puts on this stream as a graph; returns a function that launches it.

        Raises:
            EngineError: it cannot be captured; the stream is usable again.
        """
        mode = self.cudart.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self.call("cudaStreamBeginCapture", self._stream, mode)
        failure: EngineError | None = None
        try:
            work()
        except EngineError as error:
            failure = error
        ended, graph = self.cudart.cudaStreamEndCapture(self._stream)
        if failure is not None or int(ended):
            self.cudart.cudaGetLastError()  # forget it: a capture that failed harms nothing else
            raise failure or EngineError(
                f"CUDA error {int(ended)} at the end of the capture",
                hint="the engine runs without a graph, too; another process may use up the GPU",
            )
        (executable,) = self.call("cudaGraphInstantiate", graph, 0)
        return partial(self.call, "cudaGraphLaunch", executable, self._stream)
