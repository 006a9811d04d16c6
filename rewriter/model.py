"""A model in memory: a small proto beside its large weights, loaded and saved without loss.

Initializers of the main graph from `DETACH_BYTES` on leave the proto and live in
`Model.weights` as read-only arrays. Copies, checks and shape inference then cost the same
for a model of 1 MB and one of 10 GB, and files with external data are mapped, not read.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import external_data_helper, numpy_helper

from rewriter.errors import ModelError, OutputError

Array = np.ndarray[Any, np.dtype[Any]]

DETACH_BYTES = 1024
"""Shape arithmetic reads constants of a few dozen integers; everything larger is a weight."""

PROTOBUF_LIMIT = 2**31 - 1 - 2**20
"""Largest message that protobuf serialises, less 1 MiB for the graph around the weights."""

DETACHED = "detached-by-rewriter"
"""`location` of a detached initializer; never seen in a file that `save` wrote."""

_WHOLE_BYTE_TYPES = frozenset(
    getattr(onnx.TensorProto, name)
    for name in "FLOAT FLOAT16 BFLOAT16 DOUBLE INT8 INT16 INT32 INT64 UINT8 UINT16 UINT32 UINT64 BOOL".split()
)

_PACKED_TYPES: dict[int, int] = {
    getattr(onnx.TensorProto, name): bits
    for name, bits in (("INT4", 4), ("UINT4", 4), ("FLOAT4E2M1", 4), ("INT2", 2), ("UINT2", 2))
    if hasattr(onnx.TensorProto, name)  # the last two are younger than the oldest onnx that we take
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
    """What callers of the model see. Initializers that are listed as inputs (IR 3) are not part of it."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


@dataclass
class Model:
    """A ModelProto whose large initializers are held apart.

    Attributes:
        proto: The graph. A detached initializer keeps its name, type and dims in it.
        weights: Data of the detached initializers of the main graph, by name, read-only.
        path: The file it was loaded from, for messages.
        external: True when that file kept weights in external data; `save` then does, too.
    """

    proto: onnx.ModelProto
    weights: dict[str, Array] = field(default_factory=dict)
    path: Path | None = None
    external: bool = False

    @property
    def opset(self) -> int:
        """Version of the default operator set (0 if the model imports none)."""
        return next((o.version for o in self.proto.opset_import if o.domain in ("", "ai.onnx")), 0)

    @property
    def signature(self) -> Signature:
        graph = self.proto.graph
        constants = {t.name for t in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
        return Signature(
            tuple(_port(v) for v in graph.input if v.name not in constants),
            tuple(_port(v) for v in graph.output),
        )

    @property
    def size(self) -> int:
        """Bytes of the model with its weights."""
        return self.proto.ByteSize() + sum(a.nbytes for a in self.weights.values())

    def copy(self) -> Model:
        """An independent model; the weights' arrays are shared, for they are read-only."""
        proto = onnx.ModelProto()
        proto.CopyFrom(self.proto)
        return Model(proto, dict(self.weights), self.path, self.external)

    def same_as(self, other: Model) -> bool:
        """Byte for byte the same graph, with the same arrays as weights (by identity)."""
        return (
            self.weights.keys() == other.weights.keys()
            and all(other.weights[name] is array for name, array in self.weights.items())
            and self.proto.SerializeToString(deterministic=True)
            == other.proto.SerializeToString(deterministic=True)
        )

    def array(self, tensor: onnx.TensorProto) -> Array:
        """Value of an initializer of the main graph, or of a tensor that holds its own data."""
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            return self.weights[tensor.name]
        return numpy_helper.to_array(tensor)

    def detached_tensor(self, name: str, array: Array) -> onnx.TensorProto:
        """An initializer called `name` with the data of `array`, detached if it is large."""
        dtype = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        if array.nbytes < DETACH_BYTES or dtype not in _WHOLE_BYTE_TYPES:
            return numpy_helper.from_array(array, name)
        tensor = onnx.TensorProto(name=name, data_type=dtype, dims=array.shape)
        _mark_detached(tensor)
        self.weights[name] = _frozen(np.ascontiguousarray(array))
        return tensor

    def whole(self) -> onnx.ModelProto:
        """A ModelProto with all its data inside.

        Raises:
            ModelError: it would exceed what protobuf can hold.
        """
        if self.size > PROTOBUF_LIMIT:
            raise ModelError(
                f"{self.size / 2**30:.1f} GiB do not fit into one protobuf message",
                where=str(self.path) if self.path else None,
                hint="save it with external data and pass the path",
            )
        proto = onnx.ModelProto()
        proto.CopyFrom(self.proto)
        for tensor in proto.graph.initializer:
            if tensor.name in self.weights:
                _attach(tensor, self.weights[tensor.name])
        return proto

    def weightless(self, *, isolate_deprecated: bool = False) -> onnx.ModelProto:
        """The graph with detached initializers as inputs: what checkers and shape inference want.

        Nodes whose operator has no schema at the model's opset (plugins, custom operators) are moved
        to a domain of their own, which onnx leaves alone; with `isolate_deprecated`, so are those
        that onnx took back later, which its checker refuses though every runtime has them
        (GroupNormalization of opset 18).
        """
        proto = onnx.ModelProto()
        proto.CopyFrom(self.proto)
        graph = proto.graph
        inputs = {v.name for v in graph.input}
        kept = []
        for tensor in graph.initializer:
            if tensor.name not in self.weights:
                kept.append(tensor)
            elif tensor.name not in inputs:
                graph.input.append(
                    onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
                )
        kept = [onnx.TensorProto.FromString(t.SerializeToString()) for t in kept]
        del graph.initializer[:]
        graph.initializer.extend(kept)
        _isolate_unknown_ops(proto, self.opset, isolate_deprecated)
        return proto

    def restore(self, proto: onnx.ModelProto) -> Model:
        """The model of a proto that a library made out of `weightless()`: the weights come back."""
        names = self.weights.keys()
        listed = {v.name for v in self.proto.graph.input}
        inputs = [v for v in proto.graph.input if v.name not in names or v.name in listed]
        inputs = [onnx.ValueInfoProto.FromString(v.SerializeToString()) for v in inputs]
        del proto.graph.input[:]
        proto.graph.input.extend(inputs)
        old = {t.name: t for t in self.proto.graph.initializer}
        proto.graph.initializer.extend(old[name] for name in names if name in old)
        for graph in walk_graphs(proto.graph):
            for node in graph.node:
                if node.domain == UNKNOWN_DOMAIN:
                    node.ClearField("domain")
        _drop_unknown_domain(proto)
        return Model(proto, dict(self.weights), self.path, self.external)


UNKNOWN_DOMAIN = "rewriter.unknown"


def walk_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """`graph` and all its subgraphs, outer ones first."""
    yield graph
    for node in graph.node:
        for child in subgraphs(node):
            yield from walk_graphs(child)


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs that a node holds as attributes (If, Loop, Scan, SequenceMap)."""
    if not _may_hold_graphs(node.op_type, node.domain):
        return  # most nodes: reading their attributes would take longer than everything else here
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == onnx.AttributeProto.GRAPHS:
            yield from attribute.graphs


def holds_graphs(node: onnx.NodeProto) -> bool:
    """Whether a node holds a graph as an attribute."""
    return any(True for _ in subgraphs(node))


@lru_cache(maxsize=4096)
def _may_hold_graphs(op_type: str, domain: str) -> bool:
    if not onnx.defs.has(op_type, domain):
        return True
    kinds = onnx.defs.OpSchema.AttrType
    attributes = onnx.defs.get_schema(op_type, domain=domain).attributes.values()
    return any(a.type in (kinds.GRAPH, kinds.GRAPHS) for a in attributes)


def load(source: str | os.PathLike[str] | onnx.ModelProto | Any) -> Model:
    """A model from a path, a ModelProto, or an onnx_graphsurgeon.Graph.

    A ModelProto is copied, never changed.

    Raises:
        ModelError: no such file, not an ONNX model, missing external data, or an invalid graph.
    """
    if isinstance(source, onnx.ModelProto):
        model = _detach(source, None)
    elif isinstance(source, (str, os.PathLike)):
        path = Path(source)
        model = _detach(_read(path), path)
    else:
        import onnx_graphsurgeon as gs

        if not isinstance(source, gs.Graph):
            raise ModelError(
                f"cannot load a model from a {type(source).__name__}",
                hint="pass a path, an onnx.ModelProto or an onnx_graphsurgeon.Graph",
            )
        model = _detach(gs.export_onnx(source), None)
    check(model)
    return model


def check(model: Model) -> None:
    """Run onnx.checker over the graph.

    Raises:
        ModelError: the graph is invalid; the message names node and tensor.
    """
    try:
        onnx.checker.check_model(model.weightless(isolate_deprecated=True))
    except onnx.checker.ValidationError as error:
        raise ModelError(
            f"the graph is invalid: {_first_lines(str(error))}",
            where=str(model.path) if model.path else None,
            hint="export the model again, or mend the graph that the message names",
        ) from error


def save(model: Model, path: str | os.PathLike[str]) -> Path:
    """Write the model to `path` so that a failure leaves what was there before.

    Weights go into `<name>.data` beside it when the model does not fit into one protobuf message or
    came from a file that kept them so. A data file of that name that belongs to another model stays.

    Raises:
        OutputError: the folder does not exist or cannot be written, or the disk is full.
    """
    target = Path(path)
    try:
        if model.external or model.size > PROTOBUF_LIMIT:
            _save_external(model, target)
        else:
            with replacing(target) as temporary:
                temporary.write_bytes(model.whole().SerializeToString(deterministic=True))
    except OSError as error:
        raise OutputError(
            f"cannot write the model: {error.strerror or error}",
            where=str(target),
            hint="check the folder, its permissions and the free space",
        ) from error
    return target


def _port(value: onnx.ValueInfoProto) -> Port:
    tensor = value.type.tensor_type
    return Port(value.name, tensor.elem_type, shape_of(tensor))


def shape_of(tensor: onnx.TypeProto.Tensor) -> tuple[int | str | None, ...] | None:
    """Dims of a tensor type: an int, a name, or None for each axis; None if the rank is unknown."""
    if not tensor.HasField("shape"):
        return None
    return tuple(d.dim_value if d.HasField("dim_value") else (d.dim_param or None) for d in tensor.shape.dim)


def _read(path: Path) -> onnx.ModelProto:
    if not path.is_file():
        raise ModelError("no such file" if not path.exists() else "not a file", where=str(path))
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(path.read_bytes())
    except DecodeError as error:
        raise ModelError(
            "not an ONNX model, or a truncated one (protobuf cannot parse it)",
            where=str(path),
            hint="compare the file's size with the original's; files from Git LFS may be pointers",
        ) from error
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror or error}", where=str(path)) from error
    if not proto.ir_version or not proto.HasField("graph"):
        raise ModelError("not an ONNX model: it holds no graph", where=str(path))
    return proto


def _detach(proto: onnx.ModelProto, path: Path | None) -> Model:
    """Move large initializers out of `proto`: of a caller's own proto a copy is made first."""
    if path is None:
        copy = onnx.ModelProto()
        copy.CopyFrom(proto)
        proto = copy
    model = Model(proto, path=path)
    for graph in walk_graphs(proto.graph):
        for tensor in graph.initializer:
            _detach_tensor(model, tensor, main=graph is proto.graph)
    for tensor in _constant_tensors(proto):
        _detach_tensor(model, tensor, main=False)
    model.proto = onnx.ModelProto()  # a message keeps the memory of cleared fields until it is gone
    model.proto.CopyFrom(proto)
    return model


def _constant_tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    bodies = [g.node for g in walk_graphs(proto.graph)] + [f.node for f in proto.functions]
    for nodes in bodies:
        for node in nodes:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    yield attribute.t


def _detach_tensor(model: Model, tensor: onnx.TensorProto, *, main: bool) -> None:
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        model.external = True
        array = _map_external(tensor, model.path)
        if main and tensor.data_type in _PACKED_TYPES:
            _attach(tensor, array)  # two elements share a byte: NumPy cannot map them
        elif main:
            model.weights[tensor.name] = array
            _mark_detached(tensor)
        else:
            _attach(tensor, array)
    elif main and len(tensor.raw_data) >= DETACH_BYTES and tensor.data_type in _WHOLE_BYTE_TYPES:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        if len(tensor.raw_data) != dtype.itemsize * int(np.prod(tensor.dims, dtype=np.int64)):
            raise ModelError(
                f"initializer {tensor.name!r} holds {len(tensor.raw_data)} bytes, which do not "
                f"fill its shape {list(tensor.dims)} of {dtype}",
                where=str(model.path) if model.path else None,
            )
        model.weights[tensor.name] = _frozen(
            np.frombuffer(tensor.raw_data, dtype).reshape(tuple(tensor.dims))
        )
        _mark_detached(tensor)


def _map_external(tensor: onnx.TensorProto, path: Path | None) -> Array:
    info = external_data_helper.ExternalDataInfo(tensor)
    where = f"{path or 'model'}: initializer {tensor.name!r}"
    if path is None:
        raise ModelError(
            "its data is in an external file, and a ModelProto does not say where",
            where=where,
            hint="pass the path of the model instead, or load it with its data",
        )
    if Path(info.location).is_absolute() or ".." in Path(info.location).parts:
        raise ModelError(f"external data outside the model's folder: {info.location}", where=where)
    file = path.parent / info.location
    if not file.is_file():
        raise ModelError(
            f"external data file {info.location!r} is missing",
            where=where,
            hint=f"put it beside the model, in {path.parent}",
        )
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    dims = tuple(tensor.dims)
    if bits := _PACKED_TYPES.get(tensor.data_type):
        dtype, dims = np.dtype(np.uint8), ((bits * int(np.prod(dims, dtype=np.int64)) + 7) // 8,)
    offset = info.offset or 0
    if file.stat().st_size < offset + dtype.itemsize * int(np.prod(dims, dtype=np.int64)):
        raise ModelError(f"external data file {info.location!r} is too short", where=where)
    if 0 in dims:
        return _frozen(np.zeros(dims, dtype))
    return np.memmap(file, dtype, "r", offset, dims)


def _frozen(array: Array) -> Array:
    array.flags.writeable = False
    return array


def _mark_detached(tensor: onnx.TensorProto) -> None:
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    del tensor.external_data[:]
    tensor.external_data.add(key="location", value=DETACHED)


def _attach(tensor: onnx.TensorProto, array: Array) -> None:
    tensor.ClearField("external_data")
    tensor.ClearField("data_location")
    tensor.raw_data = np.ascontiguousarray(array).tobytes()


def _save_external(model: Model, target: Path) -> None:
    data = _data_file(target)
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    with replacing(data) as data_file, replacing(target) as model_file:
        with data_file.open("wb") as stream:
            for tensor in proto.graph.initializer:
                if tensor.name in model.weights:
                    _append(stream, tensor, model.weights[tensor.name], data.name)
        model_file.write_bytes(proto.SerializeToString(deterministic=True))


def _append(stream: Any, tensor: onnx.TensorProto, array: Array, location: str) -> None:
    stream.write(b"\0" * (-stream.tell() % 4096))  # page-aligned, so that readers can map it
    offset = stream.tell()
    stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    del tensor.external_data[:]
    for key, value in (("location", location), ("offset", offset), ("length", array.nbytes)):
        tensor.external_data.add(key=key, value=str(value))


def _data_file(target: Path) -> Path:
    """`<target>.data`, or the first numbered one that no other model owns."""
    owned = _locations(target)
    numbers = ("", *(f".{i}" for i in range(1, 1000)))
    candidates = (target.with_name(f"{target.name}{number}.data") for number in numbers)
    return next(c for c in candidates if not c.exists() or c.name in owned)


def _locations(path: Path) -> set[str]:
    if not path.is_file():
        return set()
    try:
        proto = _read(path)
    except ModelError:
        return set()
    external = (t for t in proto.graph.initializer if t.external_data)
    return {external_data_helper.ExternalDataInfo(t).location for t in external}


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A temporary file beside `target` that takes its place when the block ends well."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # mkstemp makes private files
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _isolate_unknown_ops(proto: onnx.ModelProto, opset: int, deprecated: bool) -> None:
    local = {(f.domain, f.name) for f in proto.functions}
    found = False
    for graph in walk_graphs(proto.graph):
        for node in graph.node:
            if node.domain not in ("", "ai.onnx") or (node.domain, node.op_type) in local:
                continue
            if opset and _is_unknown(node.op_type, opset, deprecated):
                node.domain = UNKNOWN_DOMAIN
                found = True
    if found:
        proto.opset_import.add(domain=UNKNOWN_DOMAIN, version=1)


@lru_cache(maxsize=4096)
def _is_unknown(op_type: str, opset: int, deprecated: bool) -> bool:
    try:
        schema = onnx.defs.get_schema(op_type, opset, "")
    except onnx.defs.SchemaError:
        return True
    return deprecated and bool(schema.deprecated)


def _drop_unknown_domain(proto: onnx.ModelProto) -> None:
    kept = [o for o in proto.opset_import if o.domain != UNKNOWN_DOMAIN]
    if len(kept) != len(proto.opset_import):
        kept = [onnx.OperatorSetIdProto.FromString(o.SerializeToString()) for o in kept]
        del proto.opset_import[:]
        proto.opset_import.extend(kept)


def _first_lines(text: str, count: int = 3) -> str:
    return " ".join(line.strip() for line in text.strip().splitlines()[:count])
