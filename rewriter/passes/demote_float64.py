"""demote-float64: replaces float64 arithmetic by float32."""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from onnx import NodeProto, TensorProto, numpy_helper

from rewriter.base.text import count
from rewriter.ir.graph import GraphEditor, GraphView, attribute, display_name, open_graphs, reachable
from rewriter.ir.graph.casts import UNCHANGED, TypeRequest, retype
from rewriter.ir.graph.ops import CONTROL_FLOW
from rewriter.ir.model import Array, Model
from rewriter.ir.model.tensors import FLOATS
from rewriter.passes.base import Change, Context, Event, Exactness, ModelPass, Refusal

DOUBLE, FLOAT = int(TensorProto.DOUBLE), int(TensorProto.FLOAT)

Tensor = tuple[int, str]  # the index of a scope, and a name in it

_SIZES = {"Resize": (1, 2), "Upsample": (1,)}
"""Inputs that decide the size of the output: 2.9999998 in place of 3.0 gives another shape."""

_FLOAT32_INTEGERS = 2**24  # up to this bound, float32 holds every integer


@dataclass(frozen=True)
class DemoteFloat64(ModelPass):
    """TensorRT has no float64 arithmetic, and one torch.linspace can turn a hundred tensors into it.

    Inputs and outputs of the model keep their type, with one Cast at the border. Some arithmetic decides
    shapes and positions and stays float64: what ends in an integer (Cast), in the bounds of a Range or in the
    scales of a Resize, in whichever graph it does so.

    Declines:
        - a constant that float32 cannot hold, and the nodes that it reaches, in subgraphs and from there on,
          too: beyond 3.4e38, below 1e-45, or an integer above 2^24 that would change
    """

    exactness = Exactness(1e-5, "float32 has 24 bits: 6e-8 an operation, below 1e-5 over a deep network")
    example = """
         g (float[2,3] x) => (float[2,3] y)
        -<double half = {0.5}> {
        -    d = Cast<to = 11>(x)
        -    m = Mul(d, half)
        +<float half = {0.5}> {
        +    m = Mul(x, half)
             y = Cast<to = 1>(m)
         }"""

    def rewrite_model(self, model: Model, context: Context) -> Iterator[Event]:
        before = _computing(model)
        if not before:
            return
        network = _Network(open_graphs(model))
        double = network.index_arithmetic()
        refused: dict[Tensor, Refusal] = {}
        for flow in network.flows:
            if flow.target not in double and (refusal := network.refusal(flow)):
                refused[flow.target] = refusal
        yield from dict.fromkeys(refused.values())
        double |= network.reached(refused, {DOUBLE})
        borders = network.borders(double)

        def node_type(scope: int, node: NodeProto) -> int:
            outputs = {(scope, name) for name in node.output}
            return UNCHANGED if outputs & borders else DOUBLE if outputs & double else FLOAT

        result = retype(model, TypeRequest(node_type, tag=self.name, floats=frozenset({DOUBLE, FLOAT})))
        fewer = before - _computing(result)
        if fewer:
            model.adopt(result)
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


def _deciding(graph: GraphEditor, node: NodeProto) -> Iterable[str]:
    """Returns the tensors at a node that must not change in the last bit."""
    if node.op_type == "Cast" and graph.dtype(node.output[0]) not in FLOATS:
        return [name for name in node.input if _is_double(graph, name)]
    if node.op_type == "Range":
        return [name for name in (*node.input, *node.output) if graph.dtype(name) in FLOATS]
    return [node.input[i] for i in _SIZES.get(node.op_type, ()) if i < len(node.input) and node.input[i]]


class _Flow(NamedTuple):
    """A node that reads `source` to make `target`; at the border of a subgraph, the node that holds it."""

    node: NodeProto
    source: Tensor
    target: Tensor


class _Network:
    """The tensors of all graphs, and how values get from one to another, across borders of subgraphs, too."""

    def __init__(self, graphs: Sequence[GraphEditor]) -> None:
        self.graphs = graphs
        self.scopes = {id(graph): scope for scope, graph in enumerate(graphs)}
        flows = (flow for graph in graphs for flow in (*self._border(graph), *self._within(graph)))
        self.flows = [flow for flow in flows if flow.source[1] and flow.target[1]]

    def home(self, graph: GraphView, name: str) -> Tensor:
        """The tensor that `name` is there: of the graph or of one that encloses it."""
        while graph.parent is not None and not graph.owns(name):
            graph = graph.parent
        return self.scopes[id(graph)], name

    def _within(self, graph: GraphEditor) -> Iterator[_Flow]:
        scope = self.scopes[id(graph)]
        for node in (node for node in graph.nodes if node.op_type not in CONTROL_FLOW):
            sources = [self.home(graph, name) for name in node.input]
            yield from (_Flow(node, source, (scope, name)) for source in sources for name in node.output)

    def _border(self, graph: GraphEditor) -> Iterator[_Flow]:
        """The flow from a node to its body, from there to its outputs, and from one iteration to the next."""
        if graph.parent is None or graph.owner is None or graph.owner.op_type not in CONTROL_FLOW:
            return
        owner, scope, outer = graph.owner, self.scopes[id(graph)], self.scopes[id(graph.parent)]
        inputs = [(scope, value.name) for value in graph.graph.input]
        results = [self.home(graph, value.name) for value in graph.graph.output]
        states = inputs[: len(inputs) - (attribute(owner, "num_scan_inputs") or 0)]
        if owner.op_type == "Loop":  # the number and the condition come first, and the next condition
            results, states = results[1:], states[2:]
        entering = [
            (self.home(graph.parent, name), value)
            for name, value in zip(owner.input[::-1], inputs[::-1], strict=False)
        ]
        leaving = zip(results, [(outer, name) for name in owner.output], strict=False)
        for source, target in (*entering, *leaving, *zip(results, states, strict=False)):
            yield _Flow(owner, source, target)

    def dtype(self, tensor: Tensor) -> int | None:
        return self.graphs[tensor[0]].dtype(tensor[1])

    def reached(
        self, start: Iterable[Tensor], types: Container[int | None], *, back: bool = False
    ) -> set[Tensor]:
        """All that is computed from `start`, or `back` to what that is computed from, through these types."""
        onward: dict[Tensor, list[Tensor]] = {}
        for _, source, target in self.flows:
            if self.dtype(source) in types:
                first, second = (target, source) if back else (source, target)
                onward.setdefault(first, []).append(second)
        return set(reachable(start, lambda tensor: onward.get(tensor, ())))

    def index_arithmetic(self) -> set[Tensor]:
        """The results of nodes whose float64 arithmetic becomes an integer, a length or a scale."""
        nodes = [(graph, node) for graph in self.graphs for node in graph.nodes]
        deciding = [self.home(graph, name) for graph, node in nodes for name in _deciding(graph, node)]
        decided = self.reached(deciding, FLOATS, back=True)
        makers = {self.home(graph, name): _has_double(graph, n) for graph, n in nodes for name in n.output}
        return {tensor for tensor in decided if makers.get(tensor, self.dtype(tensor) == DOUBLE)}

    def borders(self, double: AbstractSet[Tensor]) -> set[Tensor]:
        """The outputs of the nodes at whose border a tensor stays float64."""
        owners = {id(f.node) for f in self.flows if f.node.op_type in CONTROL_FLOW and f.target in double}
        held = ((graph.parent, graph.owner) for graph in self.graphs if id(graph.owner) in owners)
        return {self.home(graph, name) for graph, owner in held if graph and owner for name in owner.output}

    def refusal(self, flow: _Flow) -> Refusal | None:
        """The refusal of a node that reads, or fills its result with, a constant that float32 cannot hold."""
        name, graph = flow.source[1], self.graphs[flow.source[0]]
        filled = attribute(flow.node, "value") if flow.node.op_type == "ConstantOfShape" else None
        value = graph.constant(name) if self.dtype(flow.source) == DOUBLE else None
        if filled is not None and self.dtype(flow.target) == DOUBLE:
            value, name = numpy_helper.to_array(filled), flow.target[1]
        if value is None or (reason := _misfit(value)) is None:
            return None
        return Refusal(name, f"{reason}; {display_name(flow.node)} stays in float64, with what follows")


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
