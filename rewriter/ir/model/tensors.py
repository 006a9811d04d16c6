"""Types and shapes of tensors, by shape inference; ports; detached tensors, whose data the proto lacks."""

import math
import mmap
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import ModelProto, TensorProto

from rewriter.base import sandbox
from rewriter.base.errors import ModelError, NativeError
from rewriter.ir.model.graphs import (
    UNKNOWN_DOMAIN,
    isolate_unknown_ops,
    walk_graphs,
    walk_nodes,
    weights_as_inputs,
)

Array = np.ndarray[Any, np.dtype[Any]]

DETACH_BYTES = 1024
"""Least size of a detached tensor: constants of shape arithmetic have a few dozen integers."""

DETACHED = "detached-by-rewriter"
"""`location` of a detached initializer in memory; `save` writes the real one."""

WHOLE_BYTE_TYPES: dict[int, np.dtype[Any]] = {
    (dtype := getattr(TensorProto, name)): onnx.helper.tensor_dtype_to_np_dtype(dtype)
    for name in "FLOAT FLOAT16 BFLOAT16 DOUBLE INT8 INT16 INT32 INT64 UINT8 UINT16 UINT32 UINT64 BOOL".split()
}
"""Element types of whole bytes, with NumPy's."""

PACKED_TYPES: dict[int, int] = {
    getattr(TensorProto, name): bits
    for name, bits in (("INT4", 4), ("UINT4", 4), ("FLOAT4E2M1", 4), ("INT2", 2), ("UINT2", 2))
    if hasattr(TensorProto, name)  # the oldest supported onnx lacks the last two
}
"""Element types narrower than a byte, with their bits."""


Shape = tuple[int | str | None, ...]

FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})
"""The element types that a precision pass may exchange for one another."""


class TensorFacts(NamedTuple):
    """Element type (a TensorProto.DataType) and shape; None where inference could not tell."""

    dtype: int
    shape: Shape | None

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """The shape, if every size is known."""
        sizes = tuple(size for size in self.shape or () if isinstance(size, int))
        return sizes if self.shape is not None and len(sizes) == len(self.shape) else None

    @property
    def elements(self) -> int:
        """Number of elements; a size that is not known counts as 1."""
        return math.prod(size for size in self.shape or () if isinstance(size, int))


@dataclass
class Facts:
    """Tensor facts by scope.

    Sibling subgraphs may use one name for different tensors, so facts are kept for each graph, in
    the order of `walk_graphs`: the main graph first, then the subgraphs depth first.
    """

    scopes: list[dict[str, TensorFacts]] = field(default_factory=list)
    contradiction: str = ""  # what strict inference says against the types and shapes; "" if nothing

    @property
    def main(self) -> dict[str, TensorFacts]:
        return self.scopes[0]


@dataclass(frozen=True)
class Port:
    """One graph input or output. `shape` holds an int, a name, or None for each axis; None: unknown rank."""

    name: str
    dtype: int
    shape: Shape | None


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs, without the initializers that are listed as inputs (IR 3)."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


def port_of(value: onnx.ValueInfoProto) -> Port:
    tensor = value.type.tensor_type
    return Port(value.name, tensor.elem_type, shape_of(tensor))


def shape_of(tensor: onnx.TypeProto.Tensor) -> Shape | None:
    """Dims of a tensor type: an int, a name, or None for each axis; None if the rank is unknown."""
    if not tensor.HasField("shape"):
        return None
    return tuple(d.dim_value if d.HasField("dim_value") else (d.dim_param or None) for d in tensor.shape.dim)


def frozen(array: Array) -> Array:
    array.flags.writeable = False
    return array


def mark_detached(tensor: TensorProto) -> None:
    """Marks a tensor as one whose data is in `Model.weights`."""
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    del tensor.external_data[:]
    tensor.external_data.add(key="location", value=DETACHED)


def attach(tensor: TensorProto, array: Array) -> None:
    tensor.ClearField("external_data")
    tensor.ClearField("data_location")
    tensor.raw_data = np.ascontiguousarray(array).tobytes()


def release(array: Array) -> None:
    """Drops the pages of a mapped array from memory; they are read again when they are needed."""
    base: object = array.base
    while isinstance(base, np.ndarray):
        base = base.base
    if not (isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED") and array.flags.forc):
        return  # not mapped, on Windows, or scattered
    start = array.ctypes.data - np.frombuffer(base, np.uint8).ctypes.data
    first = start - start % mmap.PAGESIZE
    base.madvise(mmap.MADV_DONTNEED, first, start + array.nbytes - first)


def examine(
    written: bytes,  # a ModelProto
    detached: Iterable[str],  # names of the initializers whose data it lacks
    path: Path | None,
    *,
    checks: bool = False,  # run the checker; if it finds a problem, there is no inference
    infers: bool = True,
) -> tuple[Facts, str]:
    """Facts by onnx.shape_inference, and the first lines of what onnx.checker says against the graph.

    Returns:
        The facts, without scopes if nothing could be inferred, and the problem, or "".

    Raises:
        ModelError: a library crashed, or exceeded the limits of time and memory.
    """
    names = [*(["the check of the graph"] if checks else []), *(["shape inference"] if infers else [])]
    try:
        return sandbox.call(_examined, written, set(detached), checks, infers, doing=" and ".join(names))
    except NativeError as error:
        raise ModelError(error.what, where=path, hint=error.hint) from error


def _examined(data: bytes, detached: set[str], checks: bool, infers: bool) -> tuple[Facts, str]:
    """Runs in a child process.

    Libraries get the graph with detached weights as inputs, and unknown operators apart.
    """
    proto = ModelProto.FromString(data)
    weights_as_inputs(proto, detached)
    deprecated = isolate_unknown_ops(proto)
    for node in walk_nodes(proto.graph):  # the default is 1: onnx 1.23's shape inference takes it for 0
        if node.op_type == "STFT" and not any(item.name == "onesided" for item in node.attribute):
            node.attribute.append(onnx.helper.make_attribute("onesided", 1))
    written = proto.SerializeToString() if infers else b""
    for node in deprecated:  # the checker refuses them, though every runtime has them: GroupNormalization-18
        node.domain = UNKNOWN_DOMAIN
    problem = _invalidity(proto) if checks else ""
    return _inferred(written) if infers and not problem else Facts([], ""), problem


def _invalidity(proto: ModelProto) -> str:
    for value in proto.graph.output:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.shape.SetInParent()  # the checker wants one, and compares it with nothing
    for node in walk_nodes(proto.graph):  # the checker identifies nodes only by name
        if not node.name:
            node.name = f"{node.op_type}({next(filter(None, node.output), '')})"
    try:
        onnx.checker.check_model(proto)
    except onnx.checker.ValidationError as error:
        return " ".join(line.strip() for line in str(error).strip().splitlines()[:3])
    return ""


def contradiction(problem: str, path: Path | None) -> ModelError:
    hint = "correct the node that the message names, or export the model again"
    return ModelError(f"types or shapes contradict each other: {problem}", where=path, hint=hint)


def _inferred(written: bytes) -> Facts:
    """The facts of a serialised graph by shape inference, with the error of strict inference.

    Uses data propagation, which follows computed shapes, unless subgraphs use one name for two tensors: onnx
    keeps the propagated values of all graphs in one table by name, and refuses a name that comes twice.
    """
    problem = ""
    for strict, data_prop in product((True, False), repeat=2):
        if strict and problem:
            continue
        try:
            inferred = onnx.shape_inference.infer_shapes(written, strict, strict, data_prop)
            return Facts([_scope(graph) for graph in walk_graphs(inferred.graph)], problem)
        except (onnx.shape_inference.InferenceError, ValueError, RuntimeError) as error:
            if "already exists" not in str(error):
                problem = problem or str(error).strip()
    return Facts([], problem or "shape inference refuses the names of the graph")


def _scope(graph: onnx.GraphProto) -> dict[str, TensorFacts]:
    facts = {}
    for tensor in graph.initializer:
        facts[tensor.name] = TensorFacts(tensor.data_type, tuple(tensor.dims))
    types: dict[bytes, TensorFacts | None] = {}  # most tensors of a graph have one of few types
    for value in (*graph.value_info, *graph.input, *graph.output):
        key = value.type.SerializeToString()
        if key not in types:
            kind = value.type.tensor_type
            types[key] = TensorFacts(kind.elem_type, shape_of(kind)) if kind.elem_type else None
        of_scope = types[key]
        if of_scope is not None:
            facts[value.name] = of_scope
    return facts
