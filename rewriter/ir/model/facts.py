"""Element types and shapes of all tensors, by shape inference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import blake2b
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx
from onnx import ModelProto

from rewriter.ir import children
from rewriter.ir.errors import ModelError, NativeError
from rewriter.ir.model.graphs import walk_graphs, walk_nodes
from rewriter.ir.model.model import Model
from rewriter.ir.model.tensors import FLOATS, Array, Facts, Shape, TensorFacts, shape_of

__all__ = ["FLOATS", "Facts", "Shape", "TensorFacts", "at_sizes", "guarded", "hand_on", "infer"]

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


def infer(model: Model, *, strict: bool = False) -> Facts:
    """Facts by onnx.shape_inference, with data propagation so that computed shapes are followed.

    The model keeps them, and so do its copies, until the graph changes.

    Raises:
        ModelError: with `strict`, types or shapes contradict each other; the message names the node.
    """
    digest = _digest(model)
    if model.inferred is None or model.inferred[0] != digest:
        model.inferred = digest, _infer(model)
    facts = model.inferred[1]
    if strict and facts.contradiction:
        raise _contradiction(model, facts.contradiction)
    # callers add tensors to theirs
    return Facts([dict(scope) for scope in facts.scopes], facts.contradiction)


def hand_on(model: Model, result: Model) -> None:
    """Gives `result`, whose tensors have the types and shapes that they have in `model`, its facts."""
    known, scopes = infer(model), []
    for scope, graph in zip(known.scopes, walk_graphs(result.proto.graph), strict=True):
        names = {v.name for v in graph.input} | {t.name for t in graph.initializer}
        names.update(name for node in graph.node for name in node.output)
        scopes.append({name: facts for name, facts in scope.items() if name in names})
    result.inferred = _digest(result), Facts(scopes, known.contradiction)


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


def _infer(model: Model) -> Facts:
    proto, problem = guarded(_inferred, model.weightless(), doing="shape inference", path=model.path)
    if proto is None:
        raise _contradiction(model, problem)
    return Facts([_scope(graph) for graph in walk_graphs(proto.graph)], problem)


def _contradiction(model: Model, problem: str) -> ModelError:
    return ModelError(
        f"types or shapes contradict each other: {problem}",
        where=str(model.path) if model.path else None,
        hint="correct the node that the message names, or export the model again",
    )


def _inferred(proto: ModelProto) -> tuple[ModelProto | None, str]:
    """The model after shape inference, and what the strict one says against it; runs in a child process.

    With data propagation, unless subgraphs use one name for two tensors: onnx keeps propagated values of all
    graphs by name alone, and refuses a name that comes twice.
    """
    _state_onesided(proto)
    problem = ""
    for strict, data_prop in product((True, False), repeat=2):
        if strict and problem:
            continue
        try:
            return onnx.shape_inference.infer_shapes(proto, strict, strict, data_prop), problem
        except (onnx.shape_inference.InferenceError, ValueError, RuntimeError) as error:
            if "already exists" not in str(error):
                problem = problem or str(error).strip()
    return None, problem


def _state_onesided(proto: ModelProto) -> None:
    """Writes the default of STFT's `onesided`, which is 1: onnx 1.23's shape inference takes it for 0."""
    for node in walk_nodes(proto.graph):
        if node.op_type == "STFT" and not any(one.name == "onesided" for one in node.attribute):
            node.attribute.append(onnx.helper.make_attribute("onesided", 1))


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
        found = types[key]
        if found is not None:
            facts[value.name] = found
    return facts
