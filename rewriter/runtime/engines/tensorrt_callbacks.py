"""Callbacks of TensorRT during a run: memory for outputs of unknown size, and debug tensors."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np

from rewriter.ir.model import Array
from rewriter.runtime.engines.cuda import Buffer, Stream
from rewriter.runtime.engines.tensor_files import TensorWriter

NUMPY: dict[str, np.dtype[Any]] = {
    "FLOAT": np.dtype(np.float32),
    "HALF": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "FP8": np.dtype(ml_dtypes.float8_e4m3fn),
    "INT8": np.dtype(np.int8),
    "UINT8": np.dtype(np.uint8),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "BOOL": np.dtype(np.bool_),
}
"""NumPy's type for each `DataType` of inputs and outputs."""


def allocator(trt: Any, stream: Stream) -> Any:
    """Memory for an output whose shape depends on the data."""

    class Allocator(trt.IOutputAllocator):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IOutputAllocator.__init__(self)
            self.buffer = Buffer(stream, 0)
            self.shape: tuple[int, ...] = ()

        def reallocate_output(self, tensor_name: str, memory: Any, size: int, alignment: int) -> int:
            if self.buffer.size < size:
                self.buffer.free()
                self.buffer = Buffer(stream, size)
            return int(self.buffer.pointer)

        def reallocate_output_async(
            self, tensor_name: str, memory: Any, size: int, alignment: int, stream: Any
        ) -> int:
            return self.reallocate_output(tensor_name, memory, size, alignment)

        def notify_shape(self, tensor_name: str, shape: Any) -> None:
            self.shape = tuple(shape)

    return Allocator()


def listener(trt: Any, stream: Stream, writer: TensorWriter, notes: list[str]) -> Any:
    """Writes each debug tensor at once, so that one is in memory at a time."""

    class Listener(trt.IDebugListener):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IDebugListener.__init__(self)

        def process_debug_tensor(
            self,
            addr: Any,
            location: Any,
            type: Any,  # noqa: A002 - the library's name
            shape: Any,
            name: str,
            stream: Any,
        ) -> bool:
            if type.name not in NUMPY:
                notes.append(f"debug tensor {name!r} is {type.name}, which NumPy does not have")
                return True
            array: Array = np.empty(tuple(shape), NUMPY[type.name])
            if location == trt.TensorLocation.HOST:
                ctypes.memmove(array.ctypes.data, _address(addr), array.nbytes)
            else:
                source.wait()
                source.download(_address(addr), array)
            writer.write(name, array)
            return True

    source = stream
    return Listener()


def _address(pointer: Any) -> int:
    """The address in a pointer, which is a number or a capsule, depending on the version."""
    if isinstance(pointer, int):
        return pointer
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return int(get(pointer, None) or 0)
