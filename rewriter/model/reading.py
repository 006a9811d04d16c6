"""Loads models from files, protos and graphs of onnx-graphsurgeon."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import external_data_helper

from rewriter.errors import ModelError
from rewriter.model.graphs import walk_graphs
from rewriter.model.model import Model
from rewriter.model.native import guarded
from rewriter.model.tensors import (
    DETACH_BYTES,
    PACKED_TYPES,
    WHOLE_BYTE_TYPES,
    Array,
    attach,
    frozen,
    mark_detached,
)


def load(source: str | os.PathLike[str] | onnx.ModelProto | Any) -> Model:
    """Loads a model from a path, a ModelProto (which is copied), or an onnx_graphsurgeon.Graph.

    Raises:
        ModelError: no such file, not an ONNX model, missing external data, or an invalid graph.
    """
    if isinstance(source, onnx.ModelProto):
        model = _detach(source, None)
    elif isinstance(source, (str, os.PathLike)):
        path = Path(source)
        model = _detach(read_proto(path), path)
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
    problem = guarded(
        _problem, model.weightless(isolate_deprecated=True), doing="the check of the graph", path=model.path
    )
    if problem is not None:
        raise ModelError(
            f"the graph is invalid: {_first_lines(problem)}",
            where=str(model.path) if model.path else None,
            hint="export the model again, or mend the graph that the message names",
        )


def _problem(proto: onnx.ModelProto) -> str | None:
    """What onnx.checker says against a graph; runs in a child process."""
    try:
        onnx.checker.check_model(proto)
    except onnx.checker.ValidationError as error:
        return str(error)
    return None


def read_proto(path: Path) -> onnx.ModelProto:
    """Reads the proto in a file, without its external data.

    Raises:
        ModelError: no such file, or no ONNX model.
    """
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
    """Moves large initializers out of `proto`; without a path it is the caller's, and is copied first."""
    if path is None:
        copy = onnx.ModelProto()
        copy.CopyFrom(proto)
        proto = copy
    _clear_placeholders(proto)
    model = Model(proto, path=path)
    for graph in walk_graphs(proto.graph):
        for tensor in graph.initializer:
            _detach_tensor(model, tensor, main=graph is proto.graph)
    for tensor in _constant_tensors(proto):
        _detach_tensor(model, tensor, main=False)
    model.proto = onnx.ModelProto()  # a message keeps the memory of cleared fields until it is gone
    model.proto.CopyFrom(proto)
    return model


def _clear_placeholders(proto: onnx.ModelProto) -> None:
    """Makes dimensions unknown that only say so: -1, and the name `?`, both of which PaddlePaddle writes.

    As a size, -1 would refuse every sample. As a name, `?` would make unrelated axes equal.
    """
    for graph in walk_graphs(proto.graph):
        for value in (*graph.input, *graph.output, *graph.value_info):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_value < 0 or dim.dim_param == "?":
                    dim.Clear()


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
        if main and tensor.data_type in PACKED_TYPES:
            attach(tensor, array)  # two elements share a byte: NumPy cannot map them
        elif main:
            model.weights[tensor.name] = array
            mark_detached(tensor)
        else:
            attach(tensor, array)
    elif main and len(tensor.raw_data) >= DETACH_BYTES and tensor.data_type in WHOLE_BYTE_TYPES:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        if len(tensor.raw_data) != dtype.itemsize * int(np.prod(tensor.dims, dtype=np.int64)):
            raise ModelError(
                f"initializer {tensor.name!r} holds {len(tensor.raw_data)} bytes, which do not "
                f"fill its shape {list(tensor.dims)} of {dtype}",
                where=str(model.path) if model.path else None,
            )
        model.weights[tensor.name] = frozen(np.frombuffer(tensor.raw_data, dtype).reshape(tuple(tensor.dims)))
        mark_detached(tensor)


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
    if not _inside(file, path):
        raise ModelError(
            f"external data file {info.location!r} is a link out of the model's folder, to {file.resolve()}",
            where=where,
            hint="put the file itself beside the model, if you trust the link",
        )
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    dims = tuple(tensor.dims)
    if bits := PACKED_TYPES.get(tensor.data_type):
        dtype, dims = np.dtype(np.uint8), ((bits * int(np.prod(dims, dtype=np.int64)) + 7) // 8,)
    offset = info.offset or 0
    if file.stat().st_size < offset + dtype.itemsize * int(np.prod(dims, dtype=np.int64)):
        raise ModelError(f"external data file {info.location!r} is too short", where=where)
    if 0 in dims:
        return frozen(np.zeros(dims, dtype))
    return np.memmap(file, dtype, "r", offset, dims)


def _inside(file: Path, model: Path) -> bool:
    """True if a data file, its links followed, is below the folder of the model or of the model's own target.

    The second is the layout of download caches: a folder of links to files that lie side by side.
    """
    real = Path(os.path.realpath(file))
    folders = (os.path.realpath(model.parent), Path(os.path.realpath(model)).parent)
    return any(real.is_relative_to(folder) for folder in folders)


def _first_lines(text: str, count: int = 3) -> str:
    return " ".join(line.strip() for line in text.strip().splitlines()[:count])
