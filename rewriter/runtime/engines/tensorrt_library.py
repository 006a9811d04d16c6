"""TensorRT in Python: its import, log and plugins, callbacks of a run, and layers of an engine.

Used in child processes only.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from rewriter.ir.errors import EngineError
from rewriter.ir.model import Array
from rewriter.runtime.engines import nvidia_driver
from rewriter.runtime.engines.nvidia_driver import Buffer, Stream
from rewriter.runtime.engines.protocol import EngineLayer
from rewriter.runtime.engines.tensor_files import TensorWriter

LIBRARIES = ("tensorrt", "tensorrt_rtx")

INSTALL_HINT = 'pip install "rewriter[rtx]" (TensorRT-RTX builds without a GPU)'

MESSAGE_LIMIT = 200
"""Distinct warnings, and as many errors, that are kept."""


def import_tensorrt(name: str | None) -> Any:
    """Imports the module `name`, or the best one that can build here."""
    gpu = nvidia_driver.has_gpu()
    wanted = (name,) if name else (LIBRARIES if gpu else LIBRARIES[1:])
    failures = []
    for candidate in wanted:
        try:
            return import_module(candidate)
        except (ImportError, OSError) as error:
            missing = isinstance(error, ModuleNotFoundError) and error.name == candidate
            failures.append(f"{candidate} " + ("is not installed" if missing else f"does not load: {error}"))
    unusable = "" if gpu or name else " (tensorrt itself needs a GPU)"
    raise EngineError("; ".join(failures) + unusable, hint=INSTALL_HINT)


class Log:
    """Collects distinct warnings and errors; everything from INFO on goes to stderr at once."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.errors: list[str] = []

    def add(self, severity: str, message: str) -> None:
        sys.stderr.write(f"[{severity}] {message}\n")
        sys.stderr.flush()
        if severity != "INFO" and (text := without_noise(message)):
            kept = self.warnings if severity == "WARNING" else self.errors
            if text not in kept and len(kept) < MESSAGE_LIMIT:
                kept.append(text)


def logger(trt: Any, log: Log) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.Severity.INFO:
                log.add(severity.name, message)

    return Logger()


def without_noise(message: str) -> str:
    """The message on one line, without source positions and complaints about a missing GPU driver."""
    lines = [line for line in message.splitlines() if "catchCudaError" not in line]
    return re.sub(r"\.? +In \w+ at /?[\w./]+:\d+|^\w+\.[ch]pp:\d+: ", "", " ".join(lines)).strip()


def load_plugins(trt: Any, registry: Any, plugins: Sequence[str]) -> None:
    """Loads the plugins of the library itself, and those of the shared libraries `plugins`.

    Raises:
        EngineError: a file is missing, or is no plugin library.
    """
    if hasattr(trt, "init_libnvinfer_plugins"):
        trt.init_libnvinfer_plugins(None, "")
    for plugin in plugins:
        if not Path(plugin).is_file():
            raise EngineError("no such plugin library", where=plugin, hint="`plugin-lib` names a .so or .dll")
        try:
            loaded = registry.load_library(plugin)
        except Exception as error:  # the bindings raise several types
            raise EngineError(
                f"it does not load as a TensorRT plugin library: {error}",
                where=plugin,
                hint="build it for this TensorRT and this platform; `ldd` lists the libraries that it misses",
            ) from error
        if loaded is None:
            raise EngineError(
                "it registered no plugin: another library did, or the loader refused it",
                where=plugin,
                hint="see the log; a library that is linked against another TensorRT does not load",
            )


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


_NODE = re.compile(r"\[ONNX Layer: (.*?)(?: \| .*?)?\]")


def read_layers(trt: Any, engine: Any) -> tuple[EngineLayer, ...]:
    """The layers of an engine; empty if it was built without details, or the library has no inspector."""
    try:
        inspector = engine.create_engine_inspector()
        text = inspector.get_engine_information(trt.LayerInformationFormat.JSON)
    except (AttributeError, RuntimeError):
        return ()
    return layers_of(text)


def layers_of(text: str) -> tuple[EngineLayer, ...]:
    """The layers in the inspector's JSON; a layer without details is its name alone."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return ()
    layers = found.get("Layers", []) if isinstance(found, dict) else []
    return tuple(_layer(layer) for layer in layers)


def _layer(layer: Mapping[str, Any] | str) -> EngineLayer:
    if isinstance(layer, str):
        return EngineLayer(layer, "")
    outputs = tuple(
        (str(output.get("Name", "")), str(output.get("Format/Datatype") or output.get("Datatype") or ""))
        for output in layer.get("Outputs", [])
        if isinstance(output, dict)
    )
    nodes = tuple(dict.fromkeys(_NODE.findall(str(layer.get("Metadata", "")))))
    return EngineLayer(str(layer.get("Name", "")), str(layer.get("LayerType", "")), nodes, outputs)
