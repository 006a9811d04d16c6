"""Types and shapes of tensors, ports, and the detached tensors whose data is held outside the proto."""

import mmap
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto

Array = np.ndarray[Any, np.dtype[Any]]

DETACH_BYTES = 1024
"""Least size of a detached tensor: constants of shape arithmetic have a few dozen integers."""

DETACHED = "detached-by-rewriter"
"""`location` of a detached initializer in memory; `save` writes the real one."""

WHOLE_BYTE_TYPES = frozenset(
    getattr(TensorProto, name)
    for name in "FLOAT FLOAT16 BFLOAT16 DOUBLE INT8 INT16 INT32 INT64 UINT8 UINT16 UINT32 UINT64 BOOL".split()
)

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
