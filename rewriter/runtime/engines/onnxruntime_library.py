"""ONNX Runtime: its module without telemetry, values as arrays, failures explained, copies of models.

The wheels of 1.31 for Linux keep a database in the user's cache folder, with the names of nodes, and send it
to their maker. The environment switches that off before anything is written; the function switches it off
where the module was imported before.
"""

import ctypes
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import onnx
from onnx import numpy_helper

from rewriter.base import sandbox
from rewriter.base.errors import ArithmeticRunError, EngineError
from rewriter.ir.graph import captured
from rewriter.ir.model import Array, holds_graphs, replace_items, walk_graphs, walk_nodes


def import_onnxruntime() -> Any:
    """The module `onnxruntime`; an EngineError if the project came without its dependencies."""
    os.environ.update(sandbox.QUIET)
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        hint = "pip install onnxruntime; docs/install.md has all ways"
        raise EngineError("ONNX Runtime is not installed", hint=hint) from error

    onnxruntime.disable_telemetry_events()
    return onnxruntime


def value_of(array: Array, device: str = "cpu") -> Any:
    """The array as an OrtValue that shares its memory where it is contiguous and stays on the CPU."""
    ort = import_onnxruntime()
    array = np.asarray(array, order="C")
    if array.dtype.isbuiltin != 2:  # 2: registered with numpy from outside, as ml_dtypes does
        return ort.OrtValue.ortvalue_from_numpy(array, device)
    dtype = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(f"u{array.itemsize}"), dtype)


def array_of(name: str, value: Any, *, shared: bool) -> Array:
    """The tensor `name` as an array; FP8, INT4 and others that NumPy lacks have types of ml_dtypes.

    If `shared`, the memory does not belong to `value`, and the array is a copy.

    Raises:
        ArithmeticRunError: it is a sequence, a map or an optional.
    """
    if not value.is_tensor():
        raise ArithmeticRunError(
            f"output {name!r} is {value.data_type()}, and only tensors can be compared",
            hint="TensorRT only has tensors: leave the output out of the model, or use `verify=false`",
        )
    dtype = value.element_type()
    if dtype == onnx.TensorProto.STRING or onnx.helper.tensor_dtype_to_np_dtype(dtype).isbuiltin == 1:
        return np.array(value.numpy(), copy=shared or None)
    data = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    return numpy_helper.to_array(onnx.TensorProto(data_type=dtype, dims=value.shape(), raw_data=data))


class NoKernelError(ArithmeticRunError):
    """ONNX Runtime has no implementation of an operator, at least for its types.

    Attributes:
        op: The operator, after its domain unless that is the default one.
        node: The node as the user knows it; None where ONNX Runtime only names the operator.
    """

    def __init__(self, op: str, node: str | None, file: str | None) -> None:
        hint = "a custom operator only runs in TensorRT, with its plugin; use `verify=false`"
        if onnx.defs.has(op):
            hint = (
                "it has kernels from operator set 7 on: raise it with onnx.version_converter, or export again"
            )
        what = f"ONNX Runtime has no kernel for {op}" + (f" (node {node})" if node else "")
        super().__init__(what, where=file, hint=hint)
        self.op = op
        self.node = node


_NO_KERNEL = (
    re.compile(
        r"In Node, \(\"(?P<node>[^\"]*)\", (?P<op>[\w.:]+), \"(?P<domain>[^\"]*)\".*No Op registered", re.S
    ),
    re.compile(r"Fatal error: (?P<domain>[\w.]*):(?P<op>\w+)\(.*is not a registered function/op", re.S),
    re.compile(
        r"Could not find an implementation for (?P<op>[\w.:]+)\(\d+\) node with name '(?P<node>[^']*)'"
    ),
)
_NEWER = re.compile(
    r"Opset (?P<opset>\d+) is under development.* for domain (?P<domain>\S+) is till opset (?P<newest>\d+)",
    re.S,
)
_FAILED = (
    re.compile(r"while running (?P<op>\w+) node\. Name:'(?P<node>[^']*)' Status Message: (?P<why>.*)", re.S),
    re.compile(r"Type Error: (?P<why>.* of operator \((?P<op>\w+)\) in node \((?P<node>[^)]*)\).*)", re.S),
    re.compile(r"Node \((?P<node>[^)]*)\) Op \((?P<op>\w+)\) (?P<why>.*)", re.S),
    re.compile(r"Node:(?P<node>.*?) (?P<why>Output:.*)", re.S),
)

HINT = "give data with `inputs`, or other shapes with `input-shapes`; if it runs nowhere, export it again"


@contextmanager
def explained(file: str | None, what: str) -> Iterator[None]:
    """Turns a failure of ONNX Runtime into one that names the node and leaves its source paths out."""
    try:
        yield
    except Exception as error:  # its exception classes share no other base
        _explain(error, file, what)


def _explain(error: Exception, file: str | None, what: str) -> NoReturn:
    text = str(error)
    if match := _NEWER.search(text):
        opset, domain, newest = match.groups()
        raise ArithmeticRunError(
            f"operator set {opset} of {domain} is newer than {newest}, the newest that "
            f"ONNX Runtime {import_onnxruntime().__version__} has",
            where=file,
            hint=f"export the model with opset {newest} or older, or install a newer onnxruntime",
        ) from error
    for pattern in _NO_KERNEL:
        if match := pattern.search(text):
            parts = match.groupdict()
            domain = parts.get("domain")
            op = f"{domain}.{parts['op']}" if domain else parts["op"]
            raise NoKernelError(op, parts.get("node") or None, file) from error
    for pattern in _FAILED:
        if match := pattern.search(text):
            parts = match.groupdict()
            node = f"node {parts['node']}" + (f" ({parts['op']})" if parts.get("op") else "")
            where = f"{file}: {node}" if file else node
            raise ArithmeticRunError(f"{what}: {_short(parts['why'])}", where=where, hint=HINT) from error
    raise ArithmeticRunError(f"{what}: {_short(text)}", where=file, hint=HINT) from error


def _short(text: str) -> str:
    """ONNX Runtime's message without its source locations and C++ signatures, on one line."""
    text = re.sub(r"\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)
    text = re.sub(r"\S*/onnxruntime/\S+:\d+ [^\n]*?\)(?: const)? (?=[\w!(\"])", "", text)
    text = " ".join(text.split())
    return text if len(text) <= 300 else text[:297] + "..."


def keep_captured_casts(proto: onnx.ModelProto) -> None:
    """Inserts an Identity after each Cast whose result a subgraph reads.

    ONNX Runtime 1.31 removes a Cast and the one that undoes it without a look at subgraphs, even with
    its optimisations off: "Missing Input" of the node in the branch.
    """
    for graph in walk_graphs(proto.graph):
        read = {name for node in graph.node if holds_graphs(node) for name in captured(node)}
        nodes = list[onnx.NodeProto]()
        for node in graph.node:
            nodes.append(node)
            if node.op_type == "Cast" and node.output[0] in read:
                result, inner = node.output[0], f"{node.output[0]}:cast"
                node.output[0] = inner
                nodes.append(onnx.helper.make_node("Identity", [inner], [result], inner))
        if len(nodes) > len(graph.node):
            replace_items(graph.node, nodes)


def trains(proto: onnx.ModelProto) -> bool:
    """True if a BatchNormalization is in training: its kernel writes to its mean and variance.

    It declares that they are the memory of outputs 1 and 2 (`KernelDefBuilder::Alias`), inputs of the graph
    included. Of 1,303 node tests of onnx 1.23 no other operator changed a feed.
    """
    return any(
        node.op_type in ("BatchNormalization", "BatchNormInternal")
        and (any(node.output[1:]) or any(a.name == "training_mode" and a.i for a in node.attribute))
        for node in walk_nodes(proto.graph)
    )
