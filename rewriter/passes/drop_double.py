"""drop-double: replaces float64 arithmetic by float32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, TensorProto, numpy_helper

from rewriter.ir.base import Change, Context, Event, Exactness, ModelPass, Refusal
from rewriter.ir.english import count
from rewriter.ir.graph import GraphEditor, attribute, label, open_graphs, reached
from rewriter.ir.graph.casts import TypeRequest, retype
from rewriter.ir.model import Array, Model
from rewriter.ir.model.tensors import FLOATS

DOUBLE, FLOAT = int(TensorProto.DOUBLE), int(TensorProto.FLOAT)

_SIZES = {"Resize": (1, 2), "Upsample": (1,)}
"""Inputs that decide the size of the output: 2.9999998 in place of 3.0 gives another shape."""

_FLOAT32_INTEGERS = 2**24
"""Up to this bound, float32 holds every integer."""


@dataclass(frozen=True)
class DropDouble(ModelPass):
    """TensorRT has no float64 arithmetic, and one torch.linspace can turn a hundred tensors into it.

    Tensors that depend on float64 constants, Casts, random numbers and the like become float32, and so does
    what crosses the border of If, Loop and Scan. Inputs and outputs of the model keep their type, with one
    Cast at the border. Some arithmetic decides shapes and positions and stays float64: what ends in an
    integer (Cast), in the bounds of a Range or in the scales of a Resize.

    Declines:
        - a constant that float32 cannot hold, and the nodes that it reaches: beyond 3.4e38, below 1e-45,
          or an integer above 2^24 that would change
    """

    name = "drop-double"
    exactness = Exactness(
        1e-5, "float32 has 24 bits, 6e-8 for each operation; the sum over a deep network is below 1e-5"
    )
    before = """
        g (float[2,3] x) => (float[2,3] y)
        <double half = {0.5}> {
            d = Cast<to = 11>(x)
            m = Mul(d, half)
            y = Cast<to = 1>(m)
        }"""
    after = """
        g (float[2,3] x) => (float[2,3] y)
        <float half = {0.5}> {
            m = Mul(x, half)
            y = Cast<to = 1>(m)
        }"""

    def rewrite_model(self, model: Model, context: Context) -> Iterator[Event]:
        before = _computing(model)
        if not before:
            return
        double: set[tuple[int, str]] = set()
        for scope, graph in enumerate(open_graphs(model)):
            own = _index_arithmetic(graph)
            refused = list(_refusals(graph, own))
            yield from (Refusal(name, reason) for _, name, reason in refused)
            own |= _downstream(graph, [node for node, _, _ in refused])
            double.update((scope, name) for node in graph.nodes if id(node) in own for name in node.output)

        def node_type(scope: int, node: NodeProto) -> int:
            return DOUBLE if any((scope, name) in double for name in node.output) else FLOAT

        result = retype(model, TypeRequest(node_type, tag=self.name, floats=frozenset({DOUBLE, FLOAT})))
        fewer = before - _computing(result)
        if fewer:
            model.proto, model.weights = result.proto, result.weights
            ops = ", ".join(f"{n} {op}" for op, n in sorted(fewer.items()))
            yield Change("model", f"{count(fewer.total(), 'node')} in float32 instead of float64: {ops}")


def _computing(model: Model) -> Counter[str]:
    """The nodes of all graphs that read or write float64, by operator, without Casts and Constants."""
    double = any(tensor.dtype == DOUBLE for scope in model.facts().scopes for tensor in scope.values())
    graphs = open_graphs(model) if double else ()
    nodes = (node for graph in graphs for node in graph.nodes if _has_double(graph, node))
    return Counter(node.op_type for node in nodes if node.op_type not in ("Cast", "Constant"))


def _is_double(graph: GraphEditor, tensor: str) -> bool:
    return bool(tensor) and graph.dtype(tensor) == DOUBLE


def _has_double(graph: GraphEditor, node: NodeProto) -> bool:
    return any(_is_double(graph, name) for name in (*node.input, *node.output))


def _index_arithmetic(graph: GraphEditor) -> set[int]:
    """Returns the nodes (by id) whose float64 results become an integer, a length or a scale."""

    def operands(tensor: str) -> list[str]:
        node = graph.producer(tensor)
        return [] if node is None else [name for name in node.input if graph.dtype(name) in FLOATS]

    deciding = reached((name for node in graph.nodes for name in _deciding(graph, node)), operands)
    makers = (node for node in map(graph.producer, deciding) if node is not None)
    ranges = (node for node in graph.nodes if node.op_type == "Range" and _is_double(graph, node.output[0]))
    return {id(node) for node in makers if _has_double(graph, node)} | {id(node) for node in ranges}


def _deciding(graph: GraphEditor, node: NodeProto) -> Iterable[str]:
    """Returns the inputs of a node that must not change in the last bit."""
    if node.op_type == "Cast" and graph.dtype(node.output[0]) not in FLOATS:
        return [name for name in node.input if _is_double(graph, name)]
    if node.op_type == "Range":
        return [name for name in node.input if graph.dtype(name) in FLOATS]
    return [node.input[i] for i in _SIZES.get(node.op_type, ()) if i < len(node.input) and node.input[i]]


def _downstream(graph: GraphEditor, nodes: list[NodeProto]) -> set[int]:
    """Returns the nodes (by id) and all their float64 consumers, whose values need not fit float32 either."""

    def doubles(nodes: Iterable[NodeProto]) -> list[str]:
        return [name for node in nodes for name in node.output if _is_double(graph, name)]

    tensors = reached(doubles(nodes), lambda tensor: doubles(graph.consumers(tensor)))
    return {id(node) for node in (*nodes, *(n for tensor in tensors for n in graph.consumers(tensor)))}


def _refusals(graph: GraphEditor, double: set[int]) -> Iterator[tuple[NodeProto, str, str]]:
    """Yields nodes with a constant that float32 cannot hold, the constant's name, and the reason."""
    for node in graph.nodes:
        if id(node) in double or node.op_type == "Constant":
            continue
        for name in (*node.input, *node.output):
            value = _double_value(graph, node, name)
            reason = _misfit(value) if value is not None else None
            if reason:
                yield node, name, f"{reason}; {label(node)} stays in float64, with what follows"


def _double_value(graph: GraphEditor, node: NodeProto, name: str) -> Array | None:
    """Returns the float64 constant that `node` reads as `name`, or fills `name` with."""
    if not _is_double(graph, name):
        return None
    if node.op_type == "ConstantOfShape":
        return numpy_helper.to_array(attribute(node, "value"))
    return graph.constant(name) if name in node.input else None


def _misfit(value: Array) -> str | None:
    """Returns why float32 cannot hold a float64 array; None if it can, up to rounding."""
    with np.errstate(over="ignore", under="ignore"):
        single = value.astype(np.float32)
    back = single.astype(np.float64)
    finite = np.isfinite(value)
    if not np.isfinite(single[finite]).all():
        return f"its value {value[finite & ~np.isfinite(single)].flat[0]:g} is beyond float32"
    if (finite & (value != 0) & (single == 0)).any():
        return "it holds values that are 0 in float32"
    whole = finite & (np.abs(value) > _FLOAT32_INTEGERS) & (value == np.floor(np.where(finite, value, 0)))
    if (whole & (back != value)).any():
        return f"its integer {value[whole & (back != value)].flat[0]:.0f} is not one of float32"
    return None
