"""NVIDIA's driver and its GPUs, queried by ctypes without any library; memory and streams, by cuda-python.

The latter are used in child processes only. `cuda.bindings.runtime` is CUDA's own API one to one, the same
for CUDA 12 and 13, and needs no toolkit: a driver is enough. (`cuda.core` would read better; its names and
signatures still change between releases.)
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from rewriter.base.errors import EngineError
from rewriter.ir.model import Array

_NAME_BYTES = 256
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of cuda.h."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver describes it: compute capability (9, 0), newest CUDA of the driver (13, 0)."""

    name: str
    capability: tuple[int, int]
    driver_cuda: tuple[int, int]

    @property
    def cuda(self) -> str:
        return f"CUDA {'.'.join(map(str, self.driver_cuda))}"

    @property
    def sm(self) -> str:
        """The compute capability as a target has it: `sm_90`."""
        return "sm_{}{}".format(*self.capability)

    def __str__(self) -> str:
        major, minor = self.capability
        return f"{self.name} (compute capability {major}.{minor}, driver for {self.cuda})"


def library() -> Any:
    """The driver's library, which does nothing until `cuInit`; None without a driver."""
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None


def gpu() -> Gpu | None:
    """The GPU that engines use: the first one that this process sees; None without a driver."""
    driver = library()
    if driver is None or driver.cuInit(0) != 0 or not _number(driver.cuDeviceGetCount):
        return None
    device, version = _number(driver.cuDeviceGet, 0), _number(driver.cuDriverGetVersion)
    name = ctypes.create_string_buffer(_NAME_BYTES)
    driver.cuDeviceGetName(name, _NAME_BYTES, device)
    major = _number(driver.cuDeviceGetAttribute, _CAPABILITY_MAJOR, device)
    minor = _number(driver.cuDeviceGetAttribute, _CAPABILITY_MINOR, device)
    driver_cuda = (version // 1000, version % 1000 // 10)
    return Gpu(name.value.decode(errors="replace"), (major, minor), driver_cuda)


def no_gpu(why: str) -> EngineError:
    """The error for a machine without a GPU."""
    return EngineError(
        f"{why}: there is no NVIDIA driver here, or it finds no device",
        hint="`nvidia-smi` lists the GPUs, and a container needs --gpus all; "
        "without a GPU leave `engine` out: results are emulated then",
    )


def _number(function: Any, *arguments: int) -> int:
    """The number that a driver function writes through its first argument; 0 if it fails."""
    value = ctypes.c_int(0)
    return value.value if function(ctypes.byref(value), *arguments) == 0 else 0


class CudaFault(EngineError):
    """A call of CUDA failed. Most of these leave the process unable to use the GPU again."""


def runtime() -> Any:
    """Imports `cuda.bindings.runtime`; an EngineError without a GPU, cuda-python or a recent driver."""
    device = gpu()
    if device is None:
        raise no_gpu("no GPU")
    try:
        cudart = import_module("cuda.bindings.runtime")
    except ImportError as error:
        raise EngineError(f"cuda-python is missing: {error}", hint="pip install cuda-bindings") from error
    (version,) = _checked(cudart, cudart.cudaRuntimeGetVersion())
    needed = version // 1000
    if device.driver_cuda[0] < needed:
        raise EngineError(
            f"the driver is too old: it knows {device.cuda}, cuda-bindings needs CUDA {needed}",
            hint=f"update the driver, or pip install 'cuda-bindings<{needed}'",
        )
    return cudart


def _checked(cudart: Any, answer: tuple[Any, ...]) -> tuple[Any, ...]:
    error, *values = answer
    if int(error):
        _, text = cudart.cudaGetErrorString(error)
        message = text.decode() if isinstance(text, bytes) else str(text)
        full = "memory" in message
        hint = "close other programs on the GPU, or use smaller samples" if full else "see nvidia-smi"
        raise CudaFault(f"CUDA: {message} ({int(error)})", hint=hint)
    return tuple(values)


class Buffer:
    """Memory on the GPU; at least one byte, for TensorRT takes no null pointer."""

    def __init__(self, stream: Stream, size: int) -> None:
        self._stream = stream
        self.size = size
        self.pointer = int(stream.call("cudaMalloc", max(size, 1))[0])

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
        """Call a function of the CUDA runtime; its results, or a CudaFault for its error code."""
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
