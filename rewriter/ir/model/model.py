"""The model: a proto without large data, and its weights."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from rewriter.base.errors import ModelError
from rewriter.base.text import article
from rewriter.ir.model.graphs import (
    STANDARD_DOMAINS,
    UNKNOWN_DOMAIN,
    isolate_unknown_ops,
    replace_items,
    walk_graphs,
    walk_nodes,
    weights_as_inputs,
)
from rewriter.ir.model.tensors import (
    DETACH_BYTES,
    WHOLE_BYTE_TYPES,
    Array,
    Facts,
    Signature,
    attach,
    contradiction,
    examine,
    frozen,
    mark_detached,
    port_of,
)

PROTOBUF_LIMIT = 2**31 - 1 - 2**20
"""Largest message that protobuf serialises, less 1 MiB for the graph around the weights."""


@dataclass
class Model:
    """A ModelProto whose large initializers are held apart.

    Attributes:
        proto: The graph. A detached initializer keeps its name, type and dims in it.
        weights: Data of the detached initializers of the main graph, by name, read-only.
        path: The file it was loaded from, for messages.
        external: True when that file kept weights in external data, the `files`; `save` then does, too.
        notes: A sentence for each thing that `load` normalized.
        revision: A number that grows with each edit of the graph: facts belong to a revision.
        inferred: The revision that facts are of, and the facts.
        written: The revision that was serialised last, and its bytes.
    """

    proto: onnx.ModelProto
    weights: dict[str, Array] = field(default_factory=dict)
    path: Path | None = None
    external: bool = False
    files: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()
    revision: int = field(default=0, repr=False, compare=False)
    inferred: tuple[int, Facts] | None = field(default=None, repr=False, compare=False)
    written: tuple[int, bytes] = field(default=(-1, b""), repr=False, compare=False)

    @property
    def opset(self) -> int:
        """Version of the default operator set (0 if the model imports none)."""
        return self.opsets.get("", 0)

    @property
    def opsets(self) -> dict[str, int]:
        """Versions of the imported operator sets by domain; the standard one is ""."""
        imports = self.proto.opset_import
        return {"" if o.domain in STANDARD_DOMAINS else o.domain: o.version for o in imports}

    @property
    def signature(self) -> Signature:
        graph = self.proto.graph
        constants = {t.name for t in graph.initializer}
        inputs = (value for value in graph.input if value.name not in constants)
        return Signature(tuple(map(port_of, inputs)), tuple(map(port_of, graph.output)))

    @property
    def size(self) -> int:
        """Bytes of the model with its weights."""
        return self.proto.ByteSize() + sum(a.nbytes for a in self.weights.values())

    def facts(self, *, strict: bool = False) -> Facts:
        """Types and shapes of all tensors, by shape inference, which no caller may edit.

        The model keeps them, and so do its copies, until the graph changes.

        Raises:
            ModelError: with `strict`, types or shapes contradict each other; the message names the node.
        """
        if self.inferred is None or self.inferred[0] != self.revision:
            self.inferred = self.revision, examine(self.serialized(), self.weights.keys(), self.path)[0]
        facts = self.inferred[1]
        if facts.contradiction and (strict or not facts.scopes):
            raise contradiction(facts.contradiction, self.path)
        return facts

    def invalidity(self) -> str:
        """The first lines of what onnx.checker says against the graph; the same child process finds facts."""
        known = self.inferred is not None and self.inferred[0] == self.revision
        written, names = self.serialized(), self.weights.keys()
        facts, problem = examine(written, names, self.path, checks=True, infers=not known)
        if not known and not problem:
            self.inferred = self.revision, facts
        return problem

    def serialized(self) -> bytes:
        """The graph without detached weights, serialised once for each revision."""
        if self.written[0] != self.revision:
            self.written = self.revision, self.proto.SerializeToString()
        return self.written[1]

    def mark_edited(self) -> None:
        """Forgets the facts: for whoever edits `proto` without a `GraphEditor`."""
        self.revision += 1

    def adopt(self, result: Model) -> None:
        """Takes the graph, the weights and the facts of a model that was derived from this one."""
        self.proto, self.weights, self.inferred = result.proto, result.weights, result.inferred
        self.revision, self.written = result.revision, result.written

    def set_facts(self, facts: Facts) -> None:
        """Gives the model facts that are known without inference, except for tensors that it lacks."""
        scopes = []
        for scope, graph in zip(facts.scopes, walk_graphs(self.proto.graph), strict=True):
            names = {v.name for v in graph.input} | {t.name for t in graph.initializer}
            names.update(name for node in graph.node for name in node.output)
            scopes.append({name: tensor for name, tensor in scope.items() if name in names})
        self.inferred = self.revision, Facts(scopes, facts.contradiction)

    def at_sizes(self, sample: Mapping[str, Array]) -> Model:
        """The model with inputs of the shapes of a sample's arrays, by name: for estimates of work."""
        sampled = (port for port in self.signature.inputs if port.name in sample)
        if all(port.shape == np.shape(sample[port.name]) for port in sampled):
            return self
        sized = self.copy()
        del sized.proto.graph.value_info[:]  # they are of all shapes
        for value in sized.proto.graph.input:
            if value.name in sample:
                dims = value.type.tensor_type.shape.dim
                for dim, size in zip(dims, np.shape(sample[value.name]), strict=False):
                    dim.dim_value = size
        sized.mark_edited()
        return sized

    def copy(self) -> Model:
        """An independent model; the weights' arrays are shared, for they are read-only."""
        return replace(self, proto=deepcopy(self.proto), weights=dict(self.weights), notes=())

    def same_as(self, other: Model) -> bool:
        """Byte for byte the same graph, with the same arrays as weights (by identity)."""
        own, others = self.weights, other.weights
        if own.keys() != others.keys() or any(others[name] is not array for name, array in own.items()):
            return False
        written = (model.proto.SerializeToString(deterministic=True) for model in (self, other))
        return self.proto == other.proto or len({*written}) == 1  # no NaN equals itself

    def array(self, tensor: onnx.TensorProto) -> Array:
        """Value of an initializer of the main graph, or of a tensor that holds its own data."""
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            return self.weights[tensor.name]
        if (raw := tensor.raw_data) and (kind := WHOLE_BYTE_TYPES.get(tensor.data_type)) is not None:
            return np.frombuffer(raw, kind).reshape(tuple(tensor.dims))  # a tenth of the time of `to_array`
        return numpy_helper.to_array(tensor)

    def detached_tensor(self, name: str, array: Array, *, main: bool = True) -> onnx.TensorProto:
        """An initializer called `name` with the data of `array`, detached if large and of the main graph."""
        dtype = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        if not main or array.nbytes < DETACH_BYTES or dtype not in WHOLE_BYTE_TYPES:
            return numpy_helper.from_array(array, name)
        tensor = onnx.TensorProto(name=name, data_type=dtype, dims=array.shape)
        mark_detached(tensor)
        self.weights[name] = frozen(np.ascontiguousarray(array))
        return tensor

    def whole(self) -> onnx.ModelProto:
        """A ModelProto with all its data inside; a ModelError if protobuf cannot hold it."""
        if self.size > PROTOBUF_LIMIT:
            what = f"{self.size / 2**30:.1f} GiB do not fit into one protobuf message"
            raise ModelError(what, where=self.path, hint="save it with external data and pass the path")
        proto = deepcopy(self.proto)
        for tensor in proto.graph.initializer:
            if tensor.name in self.weights:
                attach(tensor, self.weights[tensor.name])
        return proto

    def weightless(self) -> onnx.ModelProto:
        """A copy of the graph for libraries, as `without_weights`."""
        return without_weights(deepcopy(self.proto))

    def restore(self, proto: onnx.ModelProto) -> Model:
        """The model of a proto that a library derived from `weightless()`, with the weights put back."""
        names = self.weights.keys()
        listed = {v.name for v in self.proto.graph.input}
        inputs = [v for v in proto.graph.input if v.name not in names or v.name in listed]
        replace_items(proto.graph.input, inputs)
        old = {t.name: t for t in self.proto.graph.initializer}
        proto.graph.initializer.extend(old[name] for name in names if name in old)
        for node in walk_nodes(proto.graph):
            if node.domain == UNKNOWN_DOMAIN:
                node.ClearField("domain")
        replace_items(proto.opset_import, [o for o in proto.opset_import if o.domain != UNKNOWN_DOMAIN])
        return replace(self, proto=proto, weights=dict(self.weights), notes=(), revision=self.revision + 1)


def without_weights(proto: onnx.ModelProto, needed: Mapping[str, Array] | None = None) -> onnx.ModelProto:
    """The graph for libraries, in place: detached initializers become inputs, but for the `needed`.

    Nodes whose operator has no schema at the model's opset (plugins, custom operators) are moved
    to a domain of their own, which onnx ignores.
    """
    needed, detached = needed or {}, set[str]()
    for tensor in proto.graph.initializer:
        if tensor.name in needed:
            attach(tensor, needed[tensor.name])
        elif tensor.data_location == onnx.TensorProto.EXTERNAL:
            detached.add(tensor.name)
    weights_as_inputs(proto, detached)
    replace_items(proto.graph.input, [v for v in proto.graph.input if v.name not in needed])
    isolate_unknown_ops(proto)
    return proto


def model_of(source: Any) -> Model:
    """The model itself, or the model of a result.

    Raises:
        ModelError: it is neither.
    """
    model = getattr(source, "model", source)
    if isinstance(model, Model):
        return model
    hint = "pass a path, an onnx.ModelProto, a rewriter.Model or an onnx_graphsurgeon.Graph"
    raise ModelError(f"{article(type(source).__name__)} is no model", hint=hint)
