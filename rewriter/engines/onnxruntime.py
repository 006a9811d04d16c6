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


def qualified(node: onnx.NodeProto) -> str:
    """The operator, with its domain in front unless that is the default one."""
    return node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"


class Session:
    """A model, loaded and ready to run on the CPU. A context manager; `close` frees its memory.

    Detached weights (`Model.weights`) are neither copied nor serialised: ONNX Runtime gets them as
    inputs, by reference, so models over 2 GiB load like small ones. (As external initializers it
    would copy them once, measured on 1.31.) Where they must be constants, for optimisations and for
    operators of other domains, they are handed over as such.

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
        proto, inputs, constants = _split(model, all_constant=optimize)
        self._inputs = {name: _value(model.weights[name]) for name in inputs}
        self._constants = {name: _value(model.weights[name]) for name in constants}
        options = _options(optimize, threads or min(MAX_THREADS, os.cpu_count() or 1))
        if constants:
            options.add_external_initializers(list(self._constants), list(self._constants.values()))
        try:
            self._session: ort.InferenceSession | None = ort.InferenceSession(
                proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
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
            given = {name: _value(array) for name, array in feeds.items()}
            values = self._session.run_with_ort_values(names, self._inputs | given)
        except Exception as error:
            _raise(error, self._file, "ONNX Runtime cannot run the model")
        return {name: _array(value) for name, value in zip(names, values, strict=True)}

    def close(self) -> None:
        """Free the session; the weights stay with the model."""
        self._session = None
        self._inputs = self._constants = {}

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
    options.enable_mem_pattern = False  # its one block comes on top of what the arena holds already
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = _QUIET
    return options


def _split(model: Model, *, all_constant: bool) -> tuple[onnx.ModelProto, list[str], list[str]]:
    """A proto for ONNX Runtime, and the detached weights by the way in which they reach it.

    Every node of the proto has a name, so that a failure can say which it was.

    Returns:
        The proto, the weights that are inputs of it, and those that are external initializers.
    """
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    foreign: set[str] = set()
    local = {(f.domain, f.name) for f in proto.functions}  # inlined: ordinary operators take any tensor
    for graph in walk_graphs(proto.graph):
        for node in graph.node:
            node.name = label(node)
            if node.domain not in ("", "ai.onnx") and (node.domain, node.op_type) not in local:
                foreign.update(node.input)
    kept, inputs, constants = [], [], []
    listed = {v.name for v in proto.graph.input}
    for tensor in proto.graph.initializer:
        detached = tensor.data_location == onnx.TensorProto.EXTERNAL
        if not detached or all_constant or tensor.name in foreign:
            kept.append(onnx.TensorProto.FromString(tensor.SerializeToString()))
            constants += [tensor.name] if detached else []
            continue
        inputs.append(tensor.name)
        if tensor.name not in listed:
            value = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            proto.graph.input.append(value)
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(kept)
    return proto, inputs, constants


def _value(array: Array) -> ort.OrtValue:
    """The array as an OrtValue that shares its memory where it is contiguous."""
    import onnxruntime as ort

    array = np.asarray(array, order="C")
    if array.dtype.isbuiltin != 2:  # 2: registered with numpy from outside, as ml_dtypes does
        return ort.OrtValue.ortvalue_from_numpy(array)
    dtype = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(f"u{array.itemsize}"), dtype)


def _array(value: ort.OrtValue) -> Array:
    if not value.is_tensor() or value.data_type() != "tensor(bfloat16)":
        array: Any = value.numpy()
        return np.asarray(array)
    import ml_dtypes

    data = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    return np.frombuffer(data, ml_dtypes.bfloat16).reshape(value.shape())


_NO_KERNEL = (
    re.compile(
        r"In Node, \(\"(?P<node>[^\"]*)\", (?P<op>[\w.:]+), \"(?P<domain>[^\"]*)\".*No Op registered", re.S
    ),
    re.compile(r"Fatal error: (?P<domain>[\w.]*):(?P<op>\w+)\(.*is not a registered function/op", re.S),
    re.compile(
        r"Could not find an implementation for (?P<op>[\w.:]+)\(\d+\) node with name '(?P<node>[^']*)'"
    ),
)
_FAILED = (
    re.compile(r"while running (?P<op>\w+) node\. Name:'(?P<node>[^']*)' Status Message: (?P<why>.*)", re.S),
    re.compile(r"Type Error: (?P<why>.* of operator \((?P<op>\w+)\) in node \((?P<node>[^)]*)\).*)", re.S),
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
