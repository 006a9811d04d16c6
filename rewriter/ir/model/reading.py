"""Loads models from files, protos and graphs of onnx-graphsurgeon."""

import os
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from rewriter.base import sandbox
from rewriter.base.errors import ModelError
from rewriter.ir.model.external_data import map_external
from rewriter.ir.model.graphs import all_graphs
from rewriter.ir.model.model import Model, model_of
from rewriter.ir.model.normalization import normalize
from rewriter.ir.model.tensors import (
    DETACH_BYTES,
    PACKED_TYPES,
    WHOLE_BYTE_TYPES,
    Array,
    attach,
    frozen,
    mark_detached,
)
from rewriter.ir.model.validation import check_proto, constant_tensors, read_proto

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
        raise ModelError(what, where=str(model.path) if model.path else None, hint=hint)


def _detach(proto: onnx.ModelProto, path: Path | None) -> Model:
    """Moves large initializers out of `proto`; without a path it is the caller's, and is copied first."""
    if path is None:
        proto = deepcopy(proto)
    where = str(path or "model")
    check_proto(proto, where)
    if not proto.graph.output:
        raise ModelError("it has no outputs", where=where, hint="name the tensors to compute as outputs")
    _clear_placeholders(proto)
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
