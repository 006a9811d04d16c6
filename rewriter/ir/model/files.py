"""Loads models, and writes models, reports and plans to files: the whole file, or nothing."""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from rewriter.base import sandbox
from rewriter.base.errors import ModelError, OutputError
from rewriter.ir.model.external_data import map_external, new_data, remove_old_data
from rewriter.ir.model.graphs import all_graphs, replace_items
from rewriter.ir.model.model import PROTOBUF_LIMIT, Model, model_of
from rewriter.ir.model.normalization import normalize
from rewriter.ir.model.output_files import file_to_replace, replacing, special, write_special
from rewriter.ir.model.tensors import (
    DETACH_BYTES,
    PACKED_TYPES,
    WHOLE_BYTE_TYPES,
    Array,
    attach,
    frozen,
    mark_detached,
)
from rewriter.ir.model.validation import check_proto, constant_tensors, make_dense, read_proto

MOST_OF_MEMORY = 2
"""Largest weights, which are mapped from their file, in units of the machine's memory: in FP16 they have to
fit into it. A sparse file may claim any size."""


def load(source: str | os.PathLike[str] | onnx.ModelProto | Any) -> Model:
    """Loads a model from a path, a ModelProto or Model (which are copied), a result with one, or a Graph of
    onnx_graphsurgeon.

    Raises:
        ModelError: no such file, not an ONNX model, missing external data, or an invalid graph.
    """
    if isinstance(source, onnx.ModelProto):
        model = _detach(source, None)
    elif isinstance(source, (str, os.PathLike)):
        path = Path(source)
        model = _detach(read_proto(path), path)
    elif (gs := sys.modules.get("onnx_graphsurgeon")) and isinstance(source, gs.Graph):
        model = _detach(gs.export_onnx(source), None)
    else:
        copy = model_of(source).copy()
        copy.mark_edited()  # its owner may have
        return copy
    model.notes = normalize(model)
    model.mark_edited()
    check(model)
    return model


def check(model: Model) -> None:
    """Runs onnx.checker over the graph, and finds its facts; a ModelError if it is invalid."""
    if problem := model.invalidity():
        what = f"the graph is invalid: {problem}"
        hint = "export the model again, or correct the graph that the message names"
        raise ModelError(what, where=model.path, hint=hint)


def _detach(proto: onnx.ModelProto, path: Path | None) -> Model:
    """Moves large initializers out of `proto`; without a path it is the caller's, and is copied first."""
    if path is None:
        proto = deepcopy(proto)
    where = str(path or "model")
    check_proto(proto, where)
    if not proto.graph.output:
        raise ModelError("it has no outputs", where=where, hint="name the tensors to compute as outputs")
    _clear_placeholders(proto)
    make_dense(proto, where)
    model = Model(proto, path=path)
    opened: dict[Path, Array] = {}
    for graph in all_graphs(proto):
        for tensor in graph.initializer:
            _detach_tensor(model, tensor, opened, main=graph is proto.graph)
    for _, tensor in constant_tensors(proto):
        _detach_tensor(model, tensor, opened, main=False)
    model.files = tuple(opened)
    memory = MOST_OF_MEMORY * sandbox.memory("MemTotal")
    if memory and model.size > memory:
        size = f"{model.size / 2**30:.0f} GiB"
        what = f"its weights need {size}, over {MOST_OF_MEMORY} times this machine's memory"
        raise ModelError(what, where=where, hint="take a machine with more memory")
    model.proto = deepcopy(proto)  # a message keeps the memory of cleared fields until it is gone
    return model


def _clear_placeholders(proto: onnx.ModelProto) -> None:
    """Removes sizes that mean unknown: -1 and the name `?`, both written by PaddlePaddle.

    As a size, -1 would refuse every sample. As a name, `?` would make unrelated axes equal.
    """
    for graph in all_graphs(proto):
        for value in (*graph.input, *graph.output, *graph.value_info):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_value < 0 or dim.dim_param == "?":
                    dim.Clear()


def _detach_tensor(model: Model, tensor: onnx.TensorProto, opened: dict[Path, Array], *, main: bool) -> None:
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        model.external = True
        array = map_external(tensor, model.path, opened)
        if main and tensor.data_type not in PACKED_TYPES:  # elements that share a byte cannot be mapped
            model.weights[tensor.name] = array
            mark_detached(tensor)
        else:
            attach(tensor, array)
    elif main and len(tensor.raw_data) >= DETACH_BYTES and tensor.data_type in WHOLE_BYTE_TYPES:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        model.weights[tensor.name] = frozen(np.frombuffer(tensor.raw_data, dtype).reshape(tuple(tensor.dims)))
        mark_detached(tensor)


UNENCODABLE = "backslashreplace"  # file names may hold bytes that are not UTF-8


def save(model: Any, path: str | os.PathLike[str], *, map_back: bool = False) -> Path:
    """Writes a model, or a result's model; a failure or a kill leaves the old file there, with its weights.

    Weights go into a new file `<name>.data` beside it when the model does not fit into one protobuf
    message or came from a file with external data. Data that we wrote for the old model is removed, unless
    another model in the folder names it.

    Args:
        map_back: Map the model's weights from the new file of external data, so that they need no memory.
            Not on Windows, where a mapped file cannot be replaced.

    Returns:
        The path; for a model with external data behind a symbolic link, the file that the link names.

    Raises:
        OutputError: the folder does not exist or cannot be written, the disk is full, or `path` is a
            device, a pipe or a file that holds weights of the model.
    """
    model = model_of(model)
    named = Path(path)
    check_model_output(named)
    with _reporting_failure("the model", named):
        target = file_to_replace(named)
        if os.path.realpath(target) in map(os.path.realpath, model.files):
            raise OutputError("it holds weights of the model", where=named, hint="name another file")
        external = bool(model.weights) and (model.external or model.size > PROTOBUF_LIMIT)
        if external:
            proto = deepcopy(model.proto)
            # the data first, the model that names it last: a kill leaves the old pair or the new one
            with new_data(proto, model.weights, target), replacing(target) as temporary:
                temporary.write_bytes(proto.SerializeToString(deterministic=True))
            if map_back and sys.platform != "win32":
                opened: dict[Path, Array] = {}
                for tensor in proto.graph.initializer:
                    if tensor.name in model.weights:
                        model.weights[tensor.name] = map_external(tensor, target, opened)
        else:
            with replacing(target) as temporary:
                temporary.write_bytes(model.whole().SerializeToString(deterministic=True))
        remove_old_data(target)
    return target if external else named


def publish(source: Path, target: Path) -> None:
    """Copies a result of another machine, its data under a free name; an OutputError if it cannot be."""
    proto, opened = read_proto(source), dict[Path, Array]()
    external = [tensor for tensor in proto.graph.initializer if tensor.external_data]
    weights = {tensor.name: map_external(tensor, source, opened) for tensor in external}
    save(Model(proto, weights, external=True), target)


def set_metadata(proto: onnx.ModelProto | onnx.NodeProto, entries: Mapping[str, str]) -> None:
    """Sets metadata of a model or node; an empty text removes the entry. File names need not be UTF-8."""
    old = [entry for entry in proto.metadata_props if entry.key not in entries]
    texts = {key: value.encode(errors=UNENCODABLE).decode() for key, value in entries.items() if value}
    new = [onnx.StringStringEntryProto(key=key, value=value) for key, value in texts.items()]
    replace_items(proto.metadata_props, [*old, *new])


ENDINGS = (".onnx", ".pb")
"""Suffixes of models: without one, Polygraphy cannot tell that the file is ONNX."""


def check_model_output(path: Path) -> None:
    """Raises an OutputError for a device or a pipe, or the name of another kind of file."""
    if kind := special(path):
        hint = "name a file; `dry-run` does everything and writes no model"
        raise OutputError(f"it is {kind}, and a model is written to a file", where=path, hint=hint)
    if path.suffix.lower() not in ENDINGS:
        hint = f"name it {path.stem}.onnx; TensorRT's own tools build the engine from it"
        raise OutputError("a model is written as ONNX", where=path, hint=hint)


def write_text(text: str, path: Path, what: str = "the report", newline: str | None = None) -> None:
    """Write a text file; `path` is replaced only after everything is written.

    Devices and pipes are written to, and a symbolic link stays: the file that it names is replaced. `what`
    names the content in the error, and `newline` is as for `open`.

    Raises:
        OutputError: the folder does not exist or cannot be written, or the disk is full.
    """
    with _reporting_failure(what, path):
        if special(path):
            write_special(path, text.encode(errors=UNENCODABLE))
            return
        with replacing(file_to_replace(path)) as temporary:
            temporary.write_text(text, encoding="utf-8", errors=UNENCODABLE, newline=newline)


def write_json(content: Any, path: Path, what: str = "the report") -> None:
    """Write standard JSON (no NaN or infinity) in ASCII, so that no terminal obeys it, as `write_text`."""
    write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", path, what)


@contextmanager
def _reporting_failure(what: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"cannot write {what}: {error.strerror or error}"
        hint = "check the folder, its permissions and the free space"
        raise OutputError(what, where=path, hint=hint) from error
