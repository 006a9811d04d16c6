"""Models on ONNX Runtime's CPU: weights shared, not copied, and failures that name the node."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import onnx

from rewriter.edits import label
from rewriter.errors import ArithmeticRunError
from rewriter.model import Array, Model, walk_graphs

if TYPE_CHECKING:
    import onnxruntime as ort

MAX_THREADS = 2
"""Reductions and small convolutions gain little from more, and builds often share the machine."""

_QUIET = 4
"""`fatal` of OrtLoggingLevel: every failure below it also arrives as an exception."""


class NoKernelError(ArithmeticRunError):
    """ONNX Runtime has no implementation of an operator, for its types at least.

    Attributes:
        op: The operator, with its domain in front unless that is the default one.
        node: The node as the user knows it; None where ONNX Runtime names the operator alone.
    """

    def __init__(self, op: str, node: str | None, file: str | None) -> None:
        super().__init__(
            f"ONNX Runtime has no kernel for {op}" + (f" (node {node})" if node else ""),
            where=file,
            hint="a custom operator runs in TensorRT with its plugin only; use --no-verify",
        )
        self.op = op
        self.node = node


class Session:
    """A model, loaded and ready to run on the CPU. A context manager; `close` frees its memory.

    Detached weights (`Model.weights`) are handed over by reference: they are neither copied nor
    serialised, so models over 2 GiB load like small ones.

    Args:
        model: Any model; FP16 and BF16 arithmetic works as far as ONNX Runtime has kernels.
        optimize: Switch on ONNX Runtime's graph optimisations. They change rounding, so they are off.
        threads: Threads of one operator; None: as many as there are cores, at most `MAX_THREADS`.

    Raises:
        NoKernelError: an operator has no implementation.
        ArithmeticRunError: ONNX Runtime cannot load the model.
    """

    def __init__(self, model: Model, *, optimize: bool = False, threads: int | None = None) -> None:
        import onnxruntime as ort

        self._file = str(model.path) if model.path else None
        self._weights = {name: _value(array) for name, array in _shared(model).items()}
        options = _options(optimize, threads or min(MAX_THREADS, os.cpu_count() or 1))
        if self._weights:
            options.add_external_initializers(list(self._weights), list(self._weights.values()))
        data = _named(model.proto).SerializeToString()
        try:
            self._session: ort.InferenceSession | None = ort.InferenceSession(
                data, options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # its exception classes share no other base
            _raise(error, self._file, "ONNX Runtime cannot load the model")
        self.outputs: tuple[str, ...] = tuple(o.name for o in self._session.get_outputs())

    def run(self, feeds: Mapping[str, Array], outputs: Sequence[str] | None = None) -> dict[str, Array]:
        """Values of the outputs, or of those named, by name.

        Args:
            feeds: One array for each input, in its type and shape; BF16 as ml_dtypes.bfloat16.

        Raises:
            ArithmeticRunError: a feed does not fit, or a node failed, which is named.
        """
        if self._session is None:
            raise ArithmeticRunError("the session is closed", where=self._file)
        names = list(self.outputs if outputs is None else outputs)
        try:
            values = self._session.run_with_ort_values(
                names, {name: _value(array) for name, array in feeds.items()}
            )
        except Exception as error:
            _raise(error, self._file, "ONNX Runtime cannot run the model")
        return {name: _array(value) for name, value in zip(names, values, strict=True)}

    def close(self) -> None:
        """Free the session; the weights stay with the model."""
        self._session = None
        self._weights = {}

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _options(optimize: bool, threads: int) -> ort.SessionOptions:
    import onnxruntime as ort

    options = ort.SessionOptions()
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
    # The default order is a depth-first search backwards from the outputs: a cheap reader of a tensor
    # that leads to an output of its own may run last, and the tensor lives until then.
    options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = _QUIET
    return options


def _shared(model: Model) -> dict[str, Array]:
    """The detached weights that the graph still lists."""
    external = onnx.TensorProto.EXTERNAL
    return {
        t.name: model.weights[t.name] for t in model.proto.graph.initializer if t.data_location == external
    }


def _named(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The proto with a name for every node, so that a failure can say which it was."""
    graphs = list(walk_graphs(proto.graph))
    if all(node.name for graph in graphs for node in graph.node):
        return proto
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for graph in walk_graphs(copy.graph):
        for node in graph.node:
            node.name = label(node)
    return copy


def _value(array: Array) -> ort.OrtValue:
    """The array as an OrtValue that shares its memory where it is contiguous."""
    import onnxruntime as ort

    array = np.asarray(array, order="C")
    if array.dtype.kind != "V" and array.dtype.isbuiltin:
        return ort.OrtValue.ortvalue_from_numpy(array)
    dtype = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)  # ml_dtypes: numpy has no such type
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(f"u{array.itemsize}"), dtype)


def _array(value: ort.OrtValue) -> Array:
    if not value.is_tensor() or value.data_type() != "tensor(bfloat16)":
        array: Any = value.numpy()
        return np.asarray(array)
    import ml_dtypes

    data = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    return np.frombuffer(data, ml_dtypes.bfloat16).reshape(value.shape())


_NO_KERNEL = (
    re.compile(r"In Node, \(\"(?P<node>[^\"]*)\", (?P<op>[\w.:]+), \"(?P<domain>[^\"]*)\".*No Op registered", re.S),
    re.compile(r"Fatal error: (?P<domain>[\w.]*):(?P<op>\w+)\(.*is not a registered function/op", re.S),
    re.compile(r"Could not find an implementation for (?P<op>[\w.:]+)\(\d+\) node with name '(?P<node>[^']*)'"),
)
_FAILED = (
    re.compile(r"while running (?P<op>\w+) node\. Name:'(?P<node>[^']*)' Status Message: (?P<why>.*)", re.S),
    re.compile(r"Node \((?P<node>[^)]*)\) Op \((?P<op>\w+)\) (?P<why>.*)", re.S),
    re.compile(r"Node:(?P<node>.*?) (?P<why>Output:.*)", re.S),
)


def _raise(error: Exception, file: str | None, what: str) -> NoReturn:
    """Turn a failure of ONNX Runtime into one that names the node and leaves its source paths out."""
    text = str(error)
    for pattern in _NO_KERNEL:
        if match := pattern.search(text):
            found = match.groupdict()
            domain = found.get("domain")
            op = f"{domain}.{found['op']}" if domain else found["op"]
            raise NoKernelError(op, found.get("node") or None, file) from error
    for pattern in _FAILED:
        if match := pattern.search(text):
            found = match.groupdict()
            node = f"node {found['node']}" + (f" ({found['op']})" if found.get("op") else "")
            where = f"{file}: {node}" if file else node
            raise ArithmeticRunError(f"{what}: {_short(found['why'])}", where=where) from error
    raise ArithmeticRunError(f"{what}: {_short(text)}", where=file) from error


def _short(text: str) -> str:
    """ONNX Runtime's message without its source locations and C++ signatures, on one line."""
    text = re.sub(r"\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)
    text = re.sub(r"\S*/onnxruntime/\S+:\d+ [^\n]*?\)(?: const)? (?=[\w!(\"])", "", text)
    text = " ".join(text.split())
    return text if len(text) <= 300 else text[:297] + "..."
