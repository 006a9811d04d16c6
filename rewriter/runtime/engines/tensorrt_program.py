"""TensorRT and TensorRT-RTX as a `Program`: loads, runs and times; used in child processes only."""

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from ctypes import c_char_p, c_void_p, memmove, py_object, pythonapi
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from rewriter.base.errors import EngineError
from rewriter.base.text import count
from rewriter.ir.model import Array
from rewriter.ir.model.output_files import replacing
from rewriter.runtime.engines import nvidia_driver
from rewriter.runtime.engines.build import NO_TF32, onnx_node
from rewriter.runtime.engines.nvidia_driver import Buffer, Stream
from rewriter.runtime.engines.protocol import Keep, Kernel, Variant
from rewriter.runtime.engines.tensorrt_library import Log, import_tensorrt, load_plugins, logger
from rewriter.target import title

BATCH_US = 500.0
"""Duration of the back-to-back runs of one timing, against which the gaps between launches are short."""

MOST_RUNS = 50  # back-to-back runs of one timing at most

WARM_RUNS = 2
"""Runs before a capture: the first one may allocate, compile or load, which cannot be captured."""

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


def listener(trt: Any, stream: Stream, wanted: Collection[str]) -> Any:
    """Gives `keep` the wanted tensors as they are computed.

    An exception in a callback would end the process: `problems` keeps them.
    """

    class Listener(trt.IDebugListener):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IDebugListener.__init__(self)
            self.keep: Keep | None = None
            self.problems: list[str] = []

        def process_debug_tensor(
            self, address: Any, location: Any, dtype: Any, shape: Any, name: str, its: Any
        ) -> bool:
            if self.keep is not None and name in wanted and dtype.name in NUMPY:
                try:
                    array: Array = np.empty(tuple(shape), NUMPY[dtype.name])
                    if location == trt.TensorLocation.HOST:
                        memmove(array.ctypes.data, _pointer(address), array.nbytes)
                    else:
                        stream.call("cudaStreamSynchronize", int(its))
                        stream.download(_pointer(address), array)
                    self.keep(name, array)
                except Exception as error:
                    self.problems.append(f"{name}: {error}")
            return True

    return Listener()


def _pointer(address: Any) -> int:
    """An address, which the bindings pass as a number (1.6) or, by their signature, in a capsule."""
    if isinstance(address, int):
        return address
    get, name = pythonapi.PyCapsule_GetPointer, pythonapi.PyCapsule_GetName
    get.restype, get.argtypes = c_void_p, [py_object, c_char_p]
    name.restype, name.argtypes = c_char_p, [py_object]
    return int(get(address, name(address)) or 0)


def kernels_of(layers: Sequence[Any]) -> tuple[Kernel, ...]:
    """The kernels in an inspector's list of layers; none where they are names without details."""
    return tuple(
        Kernel(
            tuple(filter(None, map(onnx_node, re.split("[\x1e\x1f]", layer.get("Metadata") or "")))),
            tuple(output["Name"] for output in layer.get("Outputs", ())),
        )
        for layer in layers
        if isinstance(layer, dict)
    )


class TensorRTProgram:
    """An engine of `tensorrt` or `tensorrt_rtx` on the GPU; `kernels` as in `MeasureSettings`.

    Raises:
        EngineError: there is no such device or library, or it does not load the engine.
    """

    def __init__(
        self, module: str, variant: Variant, plugins: Sequence[Path], kernels: Path | None = None
    ) -> None:
        assert variant.engine is not None
        assert variant.tf32 or NO_TF32.items() <= os.environ.items(), (
            "it must be set before the process starts"
        )
        self._trt = trt = import_tensorrt(module)
        self.notes: list[str] = []
        self.library = f"{trt.__name__} {trt.__version__}"
        self._title = f"{title(trt.__name__)} {trt.__version__}"
        self._stream = Stream()
        self.device = str(nvidia_driver.gpu())
        self._log = Log()
        self._runtime = trt.Runtime(logger(trt, self._log))
        load_plugins(trt, self._runtime.get_plugin_registry(), plugins)
        self._engine = self._runtime.deserialize_cuda_engine(variant.engine.read_bytes())
        if self._engine is None:
            what = f"{self._title} does not load the engine on {self.device}: {self._why()}"
            raise EngineError(what, hint="build it on this machine, with this version")
        self._kernels = kernels
        self._compiled: Any = None
        self._context = self._created()
        self._buffers: dict[str, Buffer] = {}
        self._host: dict[str, Array] = {}
        self._allocators: dict[str, Any] = {}
        unfused = variant.unfused == "run" and hasattr(self._context, "unfused_tensors_debug_state")
        self.kernels = self._inspected() if unfused else ()
        self._listener = self._listening() if unfused else None
        self.cuda_graph = False
        self._graph: Callable[[], object] | None = None
        self._runs = 1

    def run(self, feeds: Mapping[str, Array], keep: Keep | None = None) -> dict[str, Array]:
        self._feed(feeds)
        if self._listener is not None:
            self._listener.keep = keep
        self._execute()
        self._stream.wait()
        if self._listener is not None:
            self._listener.keep = None
            if problems := self._listener.problems:
                self.notes.append(f"{count(len(problems), 'tensor')} could not be read: {problems[0]}")
        return {name: self._value(name) for name in self._names(self._trt.TensorIOMode.OUTPUT)}

    def prepare(self, feeds: Mapping[str, Array]) -> None:
        self._feed(feeds)
        for _ in range(WARM_RUNS):
            self._execute()
        self._stream.wait()
        try:
            self._graph = self._stream.captured(self._execute)
            self.cuda_graph = True
        except EngineError as error:
            self.notes.append(f"no CUDA graph, so launches are part of the latency: {error.what}")
        single = min(self._stream.elapsed_us(self._batch) for _ in range(3))
        self._runs = max(1, min(MOST_RUNS, round(BATCH_US / max(single, 1.0))))

    def time_us(self) -> float:
        """The mean of several back-to-back runs if a run is short."""
        return self._stream.elapsed_us(self._batch) / self._runs

    def close(self) -> None:
        """Free the buffers and keep the compiled kernels; the engine goes with the object."""
        for buffer in self._buffers.values():
            buffer.free()
        self._buffers.clear()
        if self._kernels is not None and self._compiled is not None:
            with suppress(OSError), replacing(self._kernels) as temporary:  # the next one compiles its own
                temporary.write_bytes(memoryview(self._compiled.serialize()))

    def _created(self) -> Any:
        """An execution context that compiles kernels for dynamic shapes before runs, not during them."""
        trt, engine = self._trt, self._engine
        strategies = getattr(trt, "DynamicShapesKernelSpecializationStrategy", None)
        if strategies is None or not hasattr(engine, "create_runtime_config"):
            context = engine.create_execution_context()
        else:
            config = engine.create_runtime_config()
            config.dynamic_shapes_kernel_specialization_strategy = strategies.EAGER
            if self._kernels is not None and hasattr(config, "create_runtime_cache"):
                self._compiled = config.create_runtime_cache()
                if self._kernels.exists():
                    self._compiled.deserialize(self._kernels.read_bytes())
                config.set_runtime_cache(self._compiled)
            context = engine.create_execution_context(config)
        if context is None:
            raise EngineError(
                f"{self._title} makes no execution context on {self.device}: {self._why()}",
                hint="another release may have a kernel for this GPU; or close other programs that use it",
            )
        return context

    def _inspected(self) -> tuple[Kernel, ...]:
        text = self._engine.create_engine_inspector().get_engine_information(
            self._trt.LayerInformationFormat.JSON
        )
        return kernels_of(json.loads(text)["Layers"])

    def _listening(self) -> Any:
        """A listener to the outputs of kernels that compute nodes, which the context calls from now on."""
        times = Counter(name for kernel in self.kernels for name in kernel.outputs)
        computed = {name for kernel in self.kernels if kernel.nodes for name in kernel.outputs}
        wanted = {name for name in computed if times[name] == 1}  # else nothing says which is which
        heard = listener(self._trt, self._stream, wanted)
        self._context.set_debug_listener(heard)
        self._context.unfused_tensors_debug_state = True
        return heard

    def _why(self) -> str:
        return "; ".join((self._log.errors or self._log.warnings)[-3:]) or "it gives no reason"

    def _batch(self) -> None:
        for _ in range(self._runs):
            (self._graph or self._execute)()

    def _execute(self) -> None:
        if not self._context.execute_async_v3(self._stream.handle):
            raise EngineError(
                f"{self._title} cannot run the engine: {self._why()}",
                hint="the log above names the layer; free GPU memory, or run smaller samples",
            )

    def _feed(self, feeds: Mapping[str, Array]) -> None:
        for name in self._names(self._trt.TensorIOMode.INPUT):
            self._feed_one(name, feeds)
        for name in self._names(self._trt.TensorIOMode.OUTPUT):
            self._provide(name)

    def _names(self, mode: Any) -> list[str]:
        names = map(self._engine.get_tensor_name, range(self._engine.num_io_tensors))
        return [name for name in names if self._engine.get_tensor_mode(name) == mode]

    def _feed_one(self, name: str, feeds: Mapping[str, Array]) -> None:
        if name not in feeds:
            hint = "the engine was built from a model with other inputs: build it again"
            raise EngineError(f"the samples hold no array for input {name!r}", where=name, hint=hint)
        array = np.require(feeds[name], self._dtype(name), "C")
        if not self._context.set_input_shape(name, tuple(array.shape)):
            low, _, high = self._engine.get_tensor_profile_shape(name, 0)
            profile = f"the engine's profile ({list(low)} to {list(high)})"
            what = f"shape {list(array.shape)} of input {name!r} is outside {profile}"
            raise EngineError(what, where=name, hint="widen it with `min-shapes` and `max-shapes`")
        if self._on_host(name):
            self._host[name] = array.copy()
            self._context.set_tensor_address(name, self._host[name].ctypes.data)
        else:
            self._buffer(name, array.nbytes).upload(array)

    def _provide(self, name: str) -> None:
        """Memory for an output; TensorRT allocates it if the shape depends on the data."""
        shape = tuple(self._context.get_tensor_shape(name))
        if -1 in shape:
            if name not in self._allocators:
                self._allocators[name] = allocator(self._trt, self._stream)
                self._context.set_output_allocator(name, self._allocators[name])
        elif self._on_host(name):
            self._host[name] = np.empty(shape, self._dtype(name))
            self._context.set_tensor_address(name, self._host[name].ctypes.data)
        else:
            self._buffer(name, int(np.prod(shape)) * self._dtype(name).itemsize)

    def _buffer(self, name: str, size: int) -> Buffer:
        """A buffer of at least this size, set as the tensor's address."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < size:
            if buffer is not None:
                buffer.free()
            buffer = self._buffers[name] = Buffer(self._stream, size)
        self._context.set_tensor_address(name, buffer.pointer)
        return buffer

    def _value(self, name: str) -> Array:
        if name in self._host:
            return self._host[name]
        if name in self._allocators:
            shape, buffer = self._allocators[name].shape, self._allocators[name].buffer
        else:
            shape, buffer = tuple(self._context.get_tensor_shape(name)), self._buffers[name]
        array: Array = np.empty(shape, self._dtype(name))
        self._stream.download(buffer.pointer, array)
        return array

    def _on_host(self, name: str) -> bool:
        return bool(self._engine.get_tensor_location(name) == self._trt.TensorLocation.HOST)

    def _dtype(self, name: str) -> np.dtype[Any]:
        kind = self._engine.get_tensor_dtype(name).name
        if kind not in NUMPY:
            what = f"tensor {name!r} is {kind}, which NumPy does not have"
            raise EngineError(what, where=name, hint="add a Cast to FP32 before this output")
        return NUMPY[kind]
