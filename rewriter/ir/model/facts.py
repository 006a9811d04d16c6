"""Element types and shapes of all tensors, by shape inference."""

from collections.abc import Iterable
from itertools import product
from pathlib import Path

import onnx
from onnx import ModelProto

from rewriter.base import sandbox
from rewriter.base.errors import ModelError, NativeError
from rewriter.ir.model.graphs import isolate_unknown_ops, walk_graphs, walk_nodes, weights_as_inputs
from rewriter.ir.model.tensors import Facts, TensorFacts, shape_of


def examine(
    proto: ModelProto,
    detached: Iterable[str],  # names of the initializers whose data the proto lacks
    path: Path | None,
    *,
    checks: bool = False,  # run the checker; if it finds a problem, there is no inference
    infers: bool = True,
) -> tuple[Facts, str]:
    """Facts by onnx.shape_inference, and the first lines of what onnx.checker says against the graph.

    Returns:
        The facts, without scopes if nothing could be inferred, and the problem, or "".

    Raises:
        ModelError: a library crashed, or exceeded the limits of time and memory.
    """
    names = [*(["the check of the graph"] if checks else []), *(["shape inference"] if infers else [])]
    try:
        data = proto.SerializeToString()
        return sandbox.call(_examined, data, set(detached), checks, infers, doing=" and ".join(names))
    except NativeError as error:
        raise ModelError(error.what, where=str(path) if path else None, hint=error.hint) from error


def _examined(data: bytes, detached: set[str], checks: bool, infers: bool) -> tuple[Facts, str]:
    """Runs in a child process."""
    problem = _invalidity(_of_onnx(data, detached, deprecated=True)) if checks else ""
    infers = infers and not problem
    return _inferred(_of_onnx(data, detached)) if infers else Facts([], ""), problem


def _of_onnx(data: bytes, detached: set[str], *, deprecated: bool = False) -> ModelProto:
    """A graph as onnx takes it: with detached weights as inputs, and unknown operators apart."""
    proto = ModelProto.FromString(data)
    weights_as_inputs(proto, detached)
    isolate_unknown_ops(proto, deprecated=deprecated)
    return proto


def _invalidity(proto: ModelProto) -> str:
    for value in proto.graph.output:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.shape.SetInParent()  # the checker wants one, and compares it with nothing
    for node in walk_nodes(proto.graph):  # the checker identifies nodes only by name
        node.name = node.name or f"{node.op_type}({next(filter(None, node.output), '')})"
    try:
        onnx.checker.check_model(proto)
    except onnx.checker.ValidationError as error:
        return " ".join(line.strip() for line in str(error).strip().splitlines()[:3])
    return ""


def contradiction(problem: str, path: Path | None) -> ModelError:
    return ModelError(
        f"types or shapes contradict each other: {problem}",
        where=str(path) if path else None,
        hint="correct the node that the message names, or export the model again",
    )


def _inferred(proto: ModelProto) -> Facts:
    """The facts by shape inference, with the error of strict inference.

    Uses data propagation, which follows computed shapes, unless subgraphs use one name for two tensors: onnx
    keeps the propagated values of all graphs in one table by name, and refuses a name that comes twice.
    """
    for node in walk_nodes(proto.graph):  # the default is 1: onnx 1.23's shape inference takes it for 0
        if node.op_type == "STFT" and not any(item.name == "onesided" for item in node.attribute):
            node.attribute.append(onnx.helper.make_attribute("onesided", 1))
    problem = ""
    for strict, data_prop in product((True, False), repeat=2):
        if strict and problem:
            continue
        try:
            inferred = onnx.shape_inference.infer_shapes(proto, strict, strict, data_prop)
            return Facts([_scope(graph) for graph in walk_graphs(inferred.graph)], problem)
        except (onnx.shape_inference.InferenceError, ValueError, RuntimeError) as error:
            if "already exists" not in str(error):
                problem = problem or str(error).strip()
    return Facts([], problem)


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
