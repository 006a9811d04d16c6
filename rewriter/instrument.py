"""Adds reductions to a graph, so that each float tensor yields three numbers and never leaves it.

The numbers are packed into vectors, which are the outputs of the instrumented model. Those of a
subgraph are lifted out: through If by filling in neutral values for the branch that did not run,
through Loop and Scan as scan outputs that are reduced over the iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, prod

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from rewriter.edits import attribute, reads
from rewriter.facts import FLOATS, Facts, TensorFacts
from rewriter.model import Array, Model, subgraphs, walk_graphs

Key = tuple[int, str]
"""Index of a graph in the order of `Facts.scopes`, and the tensor's name in it."""

SAME_VALUES = frozenset(
    "Reshape Transpose Squeeze Unsqueeze Flatten Identity DepthToSpace SpaceToDepth Expand Tile".split()
)
"""Operators whose output holds exactly the values of their first input, each equally often."""

_WIDENING = {
    (TensorProto.FLOAT16, TensorProto.FLOAT),
    (TensorProto.BFLOAT16, TensorProto.FLOAT),
    (TensorProto.FLOAT, TensorProto.DOUBLE),
}

_REDUCTIONS = ("ReduceMax", "ReduceMin", "ReduceL1")
"""ONNX Runtime's ReduceMax and ReduceMin ignore a NaN that is not the first element; ReduceL1 hands it
on, and without opposite signs it never makes one of its own."""

BLOCK = 256
"""Tensors that are packed together. Loading takes ONNX Runtime 1.31 quadratic time in the number of
graph outputs and in the number of one node's inputs; this size keeps both small (measured)."""

_OVER_RUNS = ("ReduceMax", "ReduceMin", "ReduceSum", "ReduceSum")
"""How highs, lows, means and runs of a loop's body are gathered over its iterations."""

_NEUTRAL = (-inf, inf, 0.0, 0.0)
"""What changes none of those four."""

Refuses = Callable[[NodeProto, int], bool]
"""Whether a node of the graph with this scope index cannot be run."""


@dataclass(frozen=True)
class Scalars:
    """The statistics of one tensor: names of scalars. `size` is its number of elements, or a scalar."""

    key: Key
    high: str
    low: str
    total: str
    size: int | str


@dataclass(frozen=True)
class Pack:
    """The statistics of several tensors: names of vectors, or none.

    Attributes:
        keys: The tensor of each element of highs, lows and means; means are summed over the runs.
        scope_runs: Where in the fourth vector it says how often each tensor's graph ran.
        runs: Length of the fourth vector.
        vectors: Highs, lows, means and runs, all FP32.
    """

    keys: tuple[Key, ...] = ()
    scope_runs: tuple[int, ...] = ()
    runs: int = 0
    vectors: tuple[str, ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        return (len(self.keys),) * 3 + (self.runs,)


@dataclass(frozen=True)
class Instrumented:
    """A model whose outputs are the statistics of its tensors.

    Attributes:
        copies: Tensors whose range is that of another one, in an order in which that is known first.
    """

    model: Model
    packs: tuple[Pack, ...]
    copies: tuple[tuple[Key, Key], ...]

    @property
    def keys(self) -> tuple[Key, ...]:
        """The tensors measured, in the order of `read`."""
        return tuple(key for pack in self.packs for key in pack.keys)

    def read(self, outputs: Mapping[str, Array]) -> tuple[Array, ...]:
        """Highs, lows, means summed over the runs, and runs of all tensors, float64, of one sample."""
        columns: tuple[list[Array], ...] = ([], [], [], [])
        for pack in self.packs:
            *statistics, runs = (outputs[name].astype(np.float64) for name in pack.vectors)
            for column, vector in zip(columns, (*statistics, runs[list(pack.scope_runs)]), strict=True):
                column.append(vector)
        return tuple(np.concatenate(column) for column in columns)


def instrument(model: Model, facts: Facts, refuses: Refuses) -> Instrumented:
    """A copy of `model` that computes statistics instead of its outputs.

    Nodes of the main graph that `refuses` names, or that hold such a node, or that depend on one are
    left out, with all their tensors.
    """
    result = model.copy()
    graph = result.proto.graph
    run = _Run(facts, max(model.opset, 1), _unused_prefix(result.proto))
    main = _Scope(run, graph, 0)
    packs = main.instrument(_unreachable(graph, refuses))
    del graph.output[:]
    del graph.value_info[:]
    for pack in packs:
        graph.output.extend(_values(pack))
    return Instrumented(result, tuple(packs), tuple(run.copies))


@dataclass
class _Run:
    """What all scopes of one call share."""

    facts: Facts
    opset: int
    prefix: str
    copies: list[tuple[Key, Key]] = field(default_factory=list)
    count: int = 0
    scopes: int = 1

    def fresh(self) -> str:
        self.count += 1
        return f"{self.prefix}{self.count}"


class _Scope:
    """One graph while its reductions are added."""

    def __init__(self, run: _Run, graph: GraphProto, index: int) -> None:
        self.run = run
        self.graph = graph
        self.index = index
        self.facts = run.facts.scopes[index]
        self.nodes: list[NodeProto] = []
        self.known = {t.name for t in graph.initializer}
        self.found: list[Scalars] = []
        self.children: list[Pack] = []

    def instrument(self, unreachable: Collection[int] = ()) -> list[Pack]:
        """Add the reductions, directly after what they read, so that no tensor lives longer for them."""
        for value in self.graph.input:
            if value.name not in self.known:
                self._measure(value.name)
        for position, node in enumerate(self.graph.node):
            if position in unreachable:
                self.run.scopes += sum(1 for g in subgraphs(node) for _ in walk_graphs(g))
            else:
                self._visit(node)
        packs = [*self._packs(), *self.children]
        self._write()
        return packs

    def _visit(self, node: NodeProto) -> None:
        self.nodes.append(node)
        if any(True for _ in subgraphs(node)):
            self._lift(node)
        for name in node.output:
            if node.op_type == "Constant":
                self.known.add(name)
            elif self._holds_values_of_input(node):
                self.known.add(name)
                self.run.copies.append(((self.index, name), (self.index, node.input[0])))
            else:
                self._measure(name)

    def _holds_values_of_input(self, node: NodeProto) -> bool:
        if not node.input or node.input[0] not in self.known or node.domain not in ("", "ai.onnx"):
            return False
        source = self.facts.get(node.input[0])
        if source is None or source.dtype not in FLOATS:
            return False
        if node.op_type == "Cast":
            to = attribute(node, "to")
            return source.dtype == to or (source.dtype, to) in _WIDENING
        return node.op_type in SAME_VALUES

    def _measure(self, name: str) -> None:
        facts = self.facts.get(name)
        if facts is None or facts.dtype not in FLOATS:
            return
        self.known.add(name)
        source = name
        if facts.dtype != TensorProto.FLOAT:
            source = self._add("Cast", [source], to=TensorProto.FLOAT)
        high, low, total = (self._add(op, [source], keepdims=0) for op in _REDUCTIONS)
        size = _size(facts) if _size(facts) is not None else self._add("Size", [source])
        self.found.append(Scalars((self.index, name), high, low, total, size))

    def _packs(self) -> Iterator[Pack]:
        """Vectors of the scalars; those whose size is known apart from those whose size is computed."""
        for kind in (int, str):
            found = [s for s in self.found if isinstance(s.size, kind)]
            for start in range(0, len(found), BLOCK):
                yield self._pack(found[start : start + BLOCK])

    def _pack(self, found: Sequence[Scalars]) -> Pack:
        totals = self._vector([s.total for s in found])
        means = self._add("Div", [totals, self._sizes([s.size for s in found])])
        vectors = (self._vector([s.high for s in found]), self._vector([s.low for s in found]), means)
        ran = self._constant([1], np.float32)
        return Pack(tuple(s.key for s in found), (0,) * len(found), 1, (*vectors, ran))

    def _sizes(self, sizes: Sequence[int | str]) -> str:
        """Numbers of elements, at least 1: the mean of nothing is 0."""
        computed = [s for s in sizes if isinstance(s, str)]
        if not computed:
            return self._constant([max(1, s) for s in sizes if isinstance(s, int)], np.float32)
        vector = self._add("Cast", [self._vector(computed)], to=TensorProto.FLOAT)
        return self._add("Max", [vector, self._constant(1, np.float32)])

    def _vector(self, scalars: Sequence[str]) -> str:
        if self.run.opset >= 11:
            sequence = self._add("SequenceConstruct", scalars)
            return self._add("ConcatFromSequence", [sequence], axis=0, new_axis=1)
        one = self._constant([1], np.int64)
        return self._add("Concat", [self._add("Reshape", [s, one]) for s in scalars], axis=0)

    def _write(self) -> None:
        nodes = [NodeProto.FromString(n.SerializeToString()) for n in self.nodes]
        del self.graph.node[:]
        self.graph.node.extend(nodes)

    # -- subgraphs ---------------------------------------------------------------------------

    def _lift(self, node: NodeProto) -> None:
        """Instrument the graphs of `node` and hand their vectors out."""
        graphs = list(subgraphs(node))
        if not self._liftable(node):
            self.run.scopes += sum(1 for g in graphs for _ in walk_graphs(g))
            return
        packs = [self._instrument_subgraph(graph) for graph in graphs]
        if not any(pack.keys for pack in packs):
            return
        given = len(graphs[0].output) - (node.op_type == "Loop")  # its condition stays inside
        node.output.extend([""] * (given - len(node.output)))
        outputs = tuple(self.run.fresh() for _ in _NEUTRAL)
        node.output.extend(outputs)
        if node.op_type == "If":
            self._lift_branches(graphs, packs, outputs)
        else:
            self._lift_iterations(node, graphs[0], packs[0], outputs)

    def _liftable(self, node: NodeProto) -> bool:
        if node.domain not in ("", "ai.onnx"):
            return False
        # Scan has a batch axis in operator set 8, which no exporter of today writes.
        return node.op_type in {"If", "Loop"} or (node.op_type == "Scan" and self.run.opset >= 9)

    def _instrument_subgraph(self, graph: GraphProto) -> Pack:
        self.run.scopes += 1
        scope = _Scope(self.run, graph, self.run.scopes - 1)
        packs = scope.instrument()
        if not packs:
            return Pack()
        vectors = []
        for lane in range(len(_NEUTRAL)):
            vectors.append(self.run.fresh())
            graph.node.append(_node("Concat", [p.vectors[lane] for p in packs], vectors[-1], axis=0))
        return _joined(packs, tuple(vectors))

    def _lift_branches(
        self, graphs: Sequence[GraphProto], packs: Sequence[Pack], outputs: tuple[str, ...]
    ) -> None:
        """Each branch yields the vectors of both, with neutral values for the other one."""
        for mine, graph in enumerate(graphs):
            vectors = []
            for lane, neutral in enumerate(_NEUTRAL):
                parts = [
                    pack.vectors[lane] if i == mine else _full(self.run, graph, pack.sizes[lane], neutral)
                    for i, pack in enumerate(packs)
                    if pack.keys
                ]
                vectors.append(self.run.fresh())
                graph.node.append(_node("Concat", parts, vectors[-1], axis=0))
            graph.output.extend(_values(_joined(packs, tuple(vectors))))
        self.children.append(_joined(packs, outputs))

    def _lift_iterations(
        self, node: NodeProto, body: GraphProto, pack: Pack, outputs: tuple[str, ...]
    ) -> None:
        """Scan outputs gather one row for each iteration; a neutral row stands for none at all."""
        body.output.extend(_values(pack))
        for item in node.attribute:
            if item.name in ("scan_output_axes", "scan_output_directions"):
                item.ints.extend([0] * len(outputs))
        vectors = []
        for rows, op, neutral, size in zip(outputs, _OVER_RUNS, _NEUTRAL, pack.sizes, strict=True):
            none = self._constant(np.full((1, size), neutral), np.float32)
            vectors.append(self._over_rows(op, self._add("Concat", [none, rows], axis=0)))
        self.children.append(replace(pack, vectors=tuple(vectors)))

    def _over_rows(self, op: str, source: str) -> str:
        if self.run.opset >= (13 if op == "ReduceSum" else 18):  # from there on axes are an input
            return self._add(op, [source, self._constant([0], np.int64)], keepdims=0)
        return self._add(op, [source], axes=[0], keepdims=0)

    def _add(self, op: str, inputs: Sequence[str], **attributes: object) -> str:
        out = self.run.fresh()
        self.nodes.append(_node(op, inputs, out, **attributes))
        return out

    def _constant(self, value: object, dtype: type[np.generic]) -> str:
        return self._add("Constant", [], value=numpy_helper.from_array(np.asarray(value, dtype)))


def _full(run: _Run, graph: GraphProto, size: int, value: float) -> str:
    """Append a constant vector to a graph that is complete already."""
    out = run.fresh()
    tensor = numpy_helper.from_array(np.full(size, value, np.float32))
    graph.node.append(_node("Constant", [], out, value=tensor))
    return out


def _node(op: str, inputs: Sequence[str], out: str, **attributes: object) -> NodeProto:
    return helper.make_node(op, inputs, [out], name=out, **attributes)


def _size(facts: TensorFacts) -> int | None:
    """Number of elements; None if the shape is not wholly known."""
    sizes = [d for d in facts.shape or () if isinstance(d, int)]
    return prod(sizes) if facts.shape is not None and len(sizes) == len(facts.shape) else None


def _joined(packs: Sequence[Pack], vectors: tuple[str, ...]) -> Pack:
    """The packs one after the other, as `vectors`."""
    keys: list[Key] = []
    scope_runs: list[int] = []
    runs = 0
    for pack in packs:
        keys += pack.keys
        scope_runs += [runs + index for index in pack.scope_runs]
        runs += pack.runs
    return Pack(tuple(keys), tuple(scope_runs), runs, vectors)


def _values(pack: Pack) -> Iterator[ValueInfoProto]:
    for name, size in zip(pack.vectors, pack.sizes, strict=True):
        yield helper.make_tensor_value_info(name, TensorProto.FLOAT, [size])


def _unreachable(graph: GraphProto, refuses: Refuses) -> set[int]:
    """Positions of the nodes of the main graph that cannot run, or lack an input because of those."""
    missing: set[str] = set()
    found: set[int] = set()
    scopes = 1
    for position, node in enumerate(graph.node):
        inner = [g for child in subgraphs(node) for g in walk_graphs(child)]
        refused = refuses(node, 0) or any(refuses(n, scopes + i) for i, g in enumerate(inner) for n in g.node)
        scopes += len(inner)
        if refused or not missing.isdisjoint(reads(node)):
            found.add(position)
            missing.update(name for name in node.output if name)
    return found


def _unused_prefix(proto: ModelProto) -> str:
    graphs = walk_graphs(proto.graph)
    names = {name for g in graphs for n in g.node for name in (*n.input, *n.output)}
    prefix = "range:"
    while any(name.startswith(prefix) for name in names):
        prefix += ":"
    return prefix
