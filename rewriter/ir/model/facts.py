"""Element types and shapes of all tensors, by shape inference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx
from onnx import ModelProto, TensorProto

from rewriter.ir import children
from rewriter.ir.errors import ModelError, NativeError
from rewriter.ir.model.graphs import walk_graphs, walk_nodes
from rewriter.ir.model.model import Model
from rewriter.ir.model.tensors import Array, shape_of

T = TypeVar("T")


def guarded(
    function: Callable[..., T], proto: ModelProto, *arguments: Any, doing: str, path: Path | None
) -> T:
    """Call a function on a proto without detached weights.

    Raises:
        ModelError: it crashed, or exceeded the limits of time and memory.
    """
    try:
        return children.call(function, proto, *arguments, doing=doing)
    except NativeError as error:
        raise ModelError(error.what, where=str(path) if path else None, hint=error.hint) from error


Shape = tuple[int | str | None, ...]

FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})
"""The element types that a precision pass may exchange for one another."""


@dataclass(frozen=True)
class TensorFacts:
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

    @property
    def main(self) -> dict[str, TensorFacts]:
        return self.scopes[0]


def infer(model: Model, *, strict: bool = False) -> Facts:
    """Facts by onnx.shape_inference, with data propagation so that computed shapes are followed.

    The model keeps them, and so do its copies, until the graph changes.

    Raises:
        ModelError: with `strict`, types or shapes contradict each other; the message names the node.
    """
    graph, inferred = _digest(model), model.inferred
    if inferred is None or inferred[0] != graph or (strict and not inferred[1]):  # strict finds no less
        model.inferred = inferred = graph, strict, _infer(model, strict)
    return Facts([dict(scope) for scope in inferred[2].scopes])  # callers add tensors to theirs


def at_sizes(model: Model, sample: Mapping[str, Array]) -> Facts:
    """Facts where the inputs have the shapes of a sample: for estimates of work, as a rewrite holds for all.

    Args:
        sample: Arrays by name of an input; other inputs stay as they are declared.
    """
    sized = model.copy()
    del sized.proto.graph.value_info[:]  # they are of all shapes
    for value in sized.proto.graph.input:
        if value.name in sample:
            dims = value.type.tensor_type.shape.dim
            for dim, size in zip(dims, np.shape(sample[value.name]), strict=False):
                dim.dim_value = size
    return infer(sized)


def _digest(model: Model) -> bytes:
    """Identifies the graph and its small constants; the values of detached weights have no influence."""
    digest = blake2b(model.proto.SerializeToString())
    digest.update("\0".join(model.weights).encode("utf-8", "surrogateescape"))
    return digest.digest()


def _infer(model: Model, strict: bool) -> Facts:
    inferred = guarded(_inferred, model.weightless(), strict, doing="shape inference", path=model.path)
    if isinstance(inferred, str):
        raise ModelError(
            f"types or shapes contradict each other: {inferred}",
            where=str(model.path) if model.path else None,
            hint="correct the node that the message names, or export the model again",
        )
    return Facts([_scope(graph) for graph in walk_graphs(inferred.graph)])


def _inferred(proto: onnx.ModelProto, strict: bool) -> onnx.ModelProto | str:
    """The model after shape inference, or the contradiction that it found; runs in a child process."""
    _state_onesided(proto)
    try:
        return _propagated(proto, strict)
    except (onnx.shape_inference.InferenceError, ValueError, RuntimeError) as error:
        return str(error).strip()


def _state_onesided(proto: onnx.ModelProto) -> None:
    """Writes the default of STFT's `onesided`, which is 1: onnx 1.23's shape inference takes it for 0."""
    for node in walk_nodes(proto.graph):
        if node.op_type == "STFT" and not any(one.name == "onesided" for one in node.attribute):
            node.attribute.append(onnx.helper.make_attribute("onesided", 1))


def _propagated(proto: onnx.ModelProto, strict: bool) -> onnx.ModelProto:
    """Shape inference with data propagation, unless subgraphs use one name for two tensors.

    onnx keeps propagated values of all graphs by name alone, and refuses a name that comes twice.
    """
    try:
        return onnx.shape_inference.infer_shapes(proto, check_type=strict, strict_mode=strict, data_prop=True)
    except onnx.shape_inference.InferenceError as error:
        if "already exists" not in str(error):
            raise
    return onnx.shape_inference.infer_shapes(proto, check_type=strict, strict_mode=strict)


def _scope(graph: onnx.GraphProto) -> dict[str, TensorFacts]:
    facts = {}
    for tensor in graph.initializer:
        facts[tensor.name] = TensorFacts(tensor.data_type, tuple(tensor.dims))
    types: dict[bytes, TensorFacts | None] = {}  # most tensors of a graph have one of few types
    for value in (*graph.value_info, *graph.input, *graph.output):
        key = value.type.SerializeToString()
        if key not in types:
            types[key] = _of_type(value.type)
        found = types[key]
        if found is not None:
            facts[value.name] = found
    return facts


def _of_type(kind: onnx.TypeProto) -> TensorFacts | None:
    if not kind.HasField("tensor_type") or not kind.tensor_type.elem_type:
        return None
    return TensorFacts(kind.tensor_type.elem_type, shape_of(kind.tensor_type))
