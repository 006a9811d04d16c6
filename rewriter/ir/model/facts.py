"""Element types and shapes of all tensors, by shape inference."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import onnx
from onnx import ModelProto

from rewriter.base import sandbox
from rewriter.base.errors import ModelError, NativeError
from rewriter.ir.model.graphs import walk_graphs, walk_nodes
from rewriter.ir.model.tensors import Facts, TensorFacts, shape_of

T = TypeVar("T")


def guarded(
    function: Callable[..., T], proto: ModelProto, *arguments: Any, doing: str, path: Path | None
) -> T:
    """Call a function on a proto without detached weights.

    Raises:
        ModelError: it crashed, or exceeded the limits of time and memory.
    """
    try:
        return sandbox.call(function, proto, *arguments, doing=doing)
    except NativeError as error:
        raise ModelError(error.what, where=str(path) if path else None, hint=error.hint) from error


def infer(proto: ModelProto, path: Path | None) -> Facts:
    """Facts of a model without detached weights, by onnx.shape_inference.

    Raises:
        ModelError: types or shapes contradict each other so that nothing can be inferred.
    """
    inferred, problem = guarded(_inferred, proto, doing="shape inference", path=path)
    if inferred is None:
        raise contradiction(problem, path)
    return Facts([_scope(graph) for graph in walk_graphs(inferred.graph)], problem)


def contradiction(problem: str, path: Path | None) -> ModelError:
    return ModelError(
        f"types or shapes contradict each other: {problem}",
        where=str(path) if path else None,
        hint="correct the node that the message names, or export the model again",
    )


def _inferred(proto: ModelProto) -> tuple[ModelProto | None, str]:
    """The model after shape inference, and the error of strict inference; runs in a child process.

    Uses data propagation, which follows computed shapes, unless subgraphs use one name for two tensors: onnx
    keeps the propagated values of all graphs in one table by name, and refuses a name that comes twice.
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
        of_scope = types[key]
        if of_scope is not None:
            facts[value.name] = of_scope
    return facts
