"""ONNX Runtime: its module without telemetry, values as arrays, failures explained, copies of models.

The wheels of 1.31 for Linux keep a database in the user's cache folder, with the names of nodes, and send it
to their maker. The environment switches that off before anything is written; the function switches it off
where the module was imported before.

The copy of a model that ONNX Runtime gets is adapted to its versions, and so that it writes to no input.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import onnx
from onnx import numpy_helper

from rewriter.ir import children
from rewriter.ir.errors import ArithmeticRunError, EngineError
from rewriter.ir.graph import captured
from rewriter.ir.model import Array, holds_graphs, opsets_of, refill, walk_graphs

if TYPE_CHECKING:
    import onnxruntime as ort

INSTALL_HINT = 'pip install "rewriter[rtx]"; docs/install.md has a light way, too'


def import_onnxruntime() -> Any:
    """The module `onnxruntime`.

    Raises:
        EngineError: it is not installed: the project came without its dependencies.
    """
    os.environ.update(children.QUIET)
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        raise EngineError("ONNX Runtime is not installed", hint=INSTALL_HINT) from error

    onnxruntime.disable_telemetry_events()
    return onnxruntime


def value_of(array: Array, device: str = "cpu") -> ort.OrtValue:
    """The array as an OrtValue that shares its memory where it is contiguous and stays on the CPU."""
    ort = import_onnxruntime()
    array = np.asarray(array, order="C")
    if array.dtype.isbuiltin != 2:  # 2: registered with numpy from outside, as ml_dtypes does
        return ort.OrtValue.ortvalue_from_numpy(array, device)
    dtype = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(f"u{array.itemsize}"), dtype)


def array_of(name: str, value: ort.OrtValue) -> Array:
    """The tensor `name` as an array; types that NumPy lacks, FP8 and INT4 among them, are those of ml_dtypes.

    Raises:
        ArithmeticRunError: it is a sequence, a map or an optional.
    """
    if not value.is_tensor():
        raise ArithmeticRunError(
            f"output {name!r} is {value.data_type()}, and only tensors can be compared",
            hint="TensorRT has tensors alone: leave the output out of the model, or use `verify=false`",
        )
    dtype = value.element_type()
    if dtype == onnx.TensorProto.STRING or onnx.helper.tensor_dtype_to_np_dtype(dtype).isbuiltin == 1:
        array: Any = value.numpy()
        return np.asarray(array)
    data = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    return numpy_helper.to_array(onnx.TensorProto(data_type=dtype, dims=value.shape(), raw_data=data))


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
            hint="a custom operator runs in TensorRT with its plugin only; use `verify=false`",
        )
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
_FAILED = (
    re.compile(r"while running (?P<op>\w+) node\. Name:'(?P<node>[^']*)' Status Message: (?P<why>.*)", re.S),
    re.compile(r"Type Error: (?P<why>.* of operator \((?P<op>\w+)\) in node \((?P<node>[^)]*)\).*)", re.S),
    re.compile(r"Node \((?P<node>[^)]*)\) Op \((?P<op>\w+)\) (?P<why>.*)", re.S),
    re.compile(r"Node:(?P<node>.*?) (?P<why>Output:.*)", re.S),
)


HINT = "see that the samples have the shapes that the model expects; if it runs nowhere, export it again"


@contextmanager
def explained(file: str | None, what: str) -> Iterator[None]:
    """Turns a failure of ONNX Runtime into one that names the node and leaves its source paths out."""
    try:
        yield
    except Exception as error:  # its exception classes share no other base
        _explain(error, file, what)


def _explain(error: Exception, file: str | None, what: str) -> NoReturn:
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
            raise ArithmeticRunError(f"{what}: {_short(found['why'])}", where=where, hint=HINT) from error
    raise ArithmeticRunError(f"{what}: {_short(text)}", where=file, hint=HINT) from error


def _short(text: str) -> str:
    """ONNX Runtime's message without its source locations and C++ signatures, on one line."""
    text = re.sub(r"\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)
    text = re.sub(r"\S*/onnxruntime/\S+:\d+ [^\n]*?\)(?: const)? (?=[\w!(\"])", "", text)
    text = " ".join(text.split())
    return text if len(text) <= 300 else text[:297] + "..."


OLD_IR, OLD_OPSET = 8, 17
"""Versions that every supported ONNX Runtime takes (1.14 and later)."""

WRITTEN: Mapping[tuple[str, str], tuple[int, ...]] = {
    ("", "BatchNormalization"): (3, 4),
    ("com.microsoft", "BatchNormInternal"): (3, 4),
}
"""Operands that a kernel writes to: in training, the running mean and variance become outputs 1 and 2.

ONNX Runtime's kernels declare that these outputs are the operands' memory (`KernelDefBuilder::Alias`), even
if it is a graph input or an initializer, unless they are outputs of the graph. Every other reuse
(`MayInplace`) is of ONNX Runtime's own memory. Of 1,303 node tests of onnx 1.23, with their outputs hidden
from the graph, only those of BatchNormalization in training changed a feed.
"""


def protect_inputs(proto: onnx.ModelProto) -> None:
    """Inserts copies before operands that a kernel may write to, so that feeds and weights stay as they are.

    Only such operands are copied, which have one number for each channel; all other memory is shared.
    """
    for graph in walk_graphs(proto.graph):
        _protect(graph)
    for function in proto.functions:
        _protect(function)
        for node in function.node:
            for attribute in node.attribute:
                for body in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                    for graph in walk_graphs(body):
                        _protect(graph)


def keep_captured_casts(proto: onnx.ModelProto) -> None:
    """Inserts an Identity behind each Cast whose result a subgraph reads.

    ONNX Runtime 1.31 removes a Cast and the one that undoes it without a look at subgraphs, even with
    its optimisations off: "Missing Input" of the node in the branch.
    """
    for graph in walk_graphs(proto.graph):
        read = {name for node in graph.node if holds_graphs(node) for name in captured(node)}
        if not any(node.op_type == "Cast" and node.output[0] in read for node in graph.node):
            continue
        refill(graph.node, [part for node in graph.node for part in _kept(node, read)])


def take_version(proto: onnx.ModelProto, file: str | None) -> None:
    """Lowers the IR version to the newest that ONNX Runtime takes, which changes nothing it computes.

    Raises:
        ArithmeticRunError: the standard operator set is newer than those that ONNX Runtime has.
    """
    if proto.ir_version > OLD_IR:
        proto.ir_version = min(proto.ir_version, newest_ir())
    opset = opsets_of(proto).get("", 0)
    if opset > OLD_OPSET and opset > newest_opset():
        raise ArithmeticRunError(
            f"operator set {opset} is newer than {newest_opset()}, the newest that "
            f"ONNX Runtime {import_onnxruntime().__version__} has",
            where=file,
            hint=f"export the model with opset {newest_opset()} or older, or install a newer onnxruntime",
        )


def learn_versions(proto: onnx.ModelProto) -> None:
    """Ask now what the model's versions are compared with: children inherit the answers."""
    if proto.ir_version > OLD_IR:
        newest_ir()
    if opsets_of(proto).get("", 0) > OLD_OPSET:
        newest_opset()


@cache
def newest_ir() -> int:
    """The newest IR version that the installed ONNX Runtime loads."""
    return children.call(_newest_ir, doing="ONNX Runtime")


def _newest_ir() -> int:
    return _newest(onnx.IR_VERSION, OLD_IR, lambda version: (version, OLD_OPSET))


@cache
def newest_opset() -> int:
    """The newest standard operator set that the installed ONNX Runtime loads."""
    return children.call(_newest_opset, doing="ONNX Runtime")


def _newest_opset() -> int:
    return _newest(onnx.defs.onnx_opset_version(), OLD_OPSET, lambda version: (OLD_IR, version))


def _newest(newest: int, oldest: int, versions: Callable[[int], tuple[int, int]]) -> int:
    """Tries versions from the newest down: ONNX Runtime has no function that names its own."""
    return next((v for v in range(newest, oldest, -1) if _loads(*versions(v))), oldest)


def _loads(ir: int, opset: int) -> bool:
    ort = import_onnxruntime()
    ports = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xy"]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Neg", ["x"], ["y"])], "g", ports[:1], ports[1:])
    proto = onnx.helper.make_model(graph, ir_version=ir, opset_imports=[onnx.helper.make_opsetid("", opset)])
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:  # its exception classes share no other base
        return False
    return True


def _protect(graph: Any) -> None:
    """Inserts the copies into a graph or a function."""
    if not any(_writes(node) for node in graph.node):
        return
    refill(graph.node, [part for node in graph.node for part in _protected(node)])


def _protected(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    """The node, with the copies that it needs before it."""
    if _writes(node):
        for place in WRITTEN[_operator(node)]:
            copy = f"{node.output[0]}:copy-of-operand-{place}"
            # a Concat of one tensor copies; Identity, Reshape and their like share memory
            yield onnx.helper.make_node("Concat", [node.input[place]], [copy], copy, axis=0)
            node.input[place] = copy
    yield node


def _kept(node: onnx.NodeProto, read: set[str]) -> Iterator[onnx.NodeProto]:
    """The node, with an Identity behind it if it is a Cast whose result is among those read."""
    yield node
    if node.op_type == "Cast" and node.output[0] in read:
        result, inner = node.output[0], f"{node.output[0]}:cast"
        node.output[0] = inner
        yield onnx.helper.make_node("Identity", [inner], [result], inner)


def _writes(node: onnx.NodeProto) -> bool:
    """True if a node is one of `WRITTEN`, in training as far as can be told."""
    trains = any(a.name == "training_mode" and (a.i or a.ref_attr_name) for a in node.attribute)
    return _operator(node) in WRITTEN and (trains or any(node.output[1:]))


def _operator(node: onnx.NodeProto) -> tuple[str, str]:
    return ("" if node.domain == "ai.onnx" else node.domain, node.op_type)
