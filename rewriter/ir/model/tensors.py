"""Ports, and the detached tensors whose data is held outside the proto."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

Array = np.ndarray[Any, np.dtype[Any]]

DETACH_BYTES = 1024
"""Least size of a detached tensor: constants of shape arithmetic have a few dozen integers."""

DETACHED = "detached-by-rewriter"
"""`location` of a detached initializer in memory; `save` writes the real one."""

WHOLE_BYTE_TYPES = frozenset(
    getattr(onnx.TensorProto, name)
    for name in "FLOAT FLOAT16 BFLOAT16 DOUBLE INT8 INT16 INT32 INT64 UINT8 UINT16 UINT32 UINT64 BOOL".split()
)

PACKED_TYPES: dict[int, int] = {
    getattr(onnx.TensorProto, name): bits
    for name, bits in (("INT4", 4), ("UINT4", 4), ("FLOAT4E2M1", 4), ("INT2", 2), ("UINT2", 2))
    if hasattr(onnx.TensorProto, name)  # the oldest supported onnx lacks the last two
}
"""Element types narrower than a byte, with their bits."""


@dataclass(frozen=True)
class Port:
    """One graph input or output. `shape` holds an int, a name, or None for each axis; None: unknown rank."""

    name: str
    dtype: int
    shape: tuple[int | str | None, ...] | None


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs, without the initializers that are listed as inputs (IR 3)."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


def port_of(value: onnx.ValueInfoProto) -> Port:
    """A graph input or output as callers see it."""
    tensor = value.type.tensor_type
    return Port(value.name, tensor.elem_type, shape_of(tensor))


def shape_of(tensor: onnx.TypeProto.Tensor) -> tuple[int | str | None, ...] | None:
    """Dims of a tensor type: an int, a name, or None for each axis; None if the rank is unknown."""
    if not tensor.HasField("shape"):
        return None
    return tuple(d.dim_value if d.HasField("dim_value") else (d.dim_param or None) for d in tensor.shape.dim)


def frozen(array: Array) -> Array:
    """Makes the array read-only and returns it."""
    array.flags.writeable = False
    return array


def mark_detached(tensor: onnx.TensorProto) -> None:
    """Marks a tensor as one whose data is in `Model.weights`."""
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    del tensor.external_data[:]
    tensor.external_data.add(key="location", value=DETACHED)


def attach(tensor: onnx.TensorProto, array: Array) -> None:
    """Writes the data of a detached tensor into it."""
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
