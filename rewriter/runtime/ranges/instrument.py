"""A copy of a model whose outputs are statistics of its tensors, too.

The statistics of a subgraph become outputs of its node. For If, the branch that did not run contributes
neutral values. For Loop and Scan, they are scan outputs that are reduced over the iterations.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, ValueInfoProto, helper

from rewriter.ir.graph import attribute, reads, states
from rewriter.ir.graph.node_list import BLOCK, NodeList
from rewriter.ir.graph.ops import RECURRENT, SAME_VALUES
from rewriter.ir.graph.weights import ChannelKey, summed_axes
from rewriter.ir.model import STANDARD_DOMAINS, Array, Model, holds_graphs, walk_graphs
from rewriter.ir.model.graphs import replace_items, subgraphs
from rewriter.ir.model.schemas import embeds
from rewriter.ir.model.tensors import FLOATS, Facts
from rewriter.runtime.emulation.recurrences import Recurrence, whole
from rewriter.runtime.ranges.reductions import (
    MOVES_OPSET,
    Key,
    Moves,
    PackedStatistics,
    Reductions,
    count_moves,
    count_moves_along,
    joined,
)

_OVER_RUNS = ("ReduceMax", "ReduceMin", "ReduceSum", "ReduceSum")
"""Reductions of highs, lows, means and runs over the iterations of a loop."""

_NEUTRAL = (-inf, inf, 0.0, 0.0)  # their neutral values

Refuses = Callable[[NodeProto, int], bool]
"""True if a node of the graph with this scope index cannot run."""


@dataclass(frozen=True)
class Instrumented:
    """A model that computes statistics."""

    model: Model
    packs: tuple[PackedStatistics, ...]  # the meaning of the outputs that it has beside its own
    # tensors with the range of another one, ordered so that the other range is known first
    copies: tuple[tuple[Key, Key], ...]
    # by the name of an output, the tensors whose channels' means it holds, with their numbers
    means: Mapping[str, Sequence[tuple[ChannelKey, int]]]

    @property
    def keys(self) -> tuple[Key | Moves, ...]:
        """The measured tensors and counts, in the order of `read`."""
        return tuple(key for pack in self.packs for key in pack.keys)

    def read(self, outputs: Mapping[str, Array]) -> tuple[Array, ...]:
        """Highs, lows, means (summed over the runs) and runs of all tensors for one sample, in float64."""
        columns: tuple[list[Array], ...] = ([], [], [], [])
        for pack in self.packs:
            *statistics, runs = (outputs[name].astype(np.float64) for name in pack.vectors)
            for column, vector in zip(columns, (*statistics, runs[list(pack.scope_runs)]), strict=True):
                column.append(vector)
        return tuple(np.concatenate(column) for column in columns)

    def read_means(self, outputs: Mapping[str, Array]) -> Iterator[tuple[ChannelKey, Array]]:
        """The means of channels in one sample, in float64."""
        for name, channels in self.means.items():
            ends = np.cumsum([size for _, size in channels])[:-1]
            parts = np.split(outputs[name].astype(np.float64), ends)
            yield from zip((key for key, _ in channels), parts, strict=True)


def instrument(model: Model, refuses: Refuses, channels: bool = False) -> Instrumented:
    """A copy of `model` that computes statistics on top of its outputs, with `channels` also their means.

    Nodes of the main graph that `refuses` accepts are left out, with nodes that contain or depend on one, and
    then the model's outputs are, too.
    """
    result = model.copy()
    graph = result.proto.graph
    run = _Run(model.facts(), max(model.opset, 1))
    for node, axis in summed_axes(graph) if channels else ():
        run.axes.setdefault(node.input[0], set()).add(axis)
    if unreachable := _unreachable(graph, refuses):
        del graph.output[:]
    packs = _Scope(run, graph, 0).instrument(unreachable)
    del graph.value_info[:]
    for pack in packs:
        graph.output.extend(_values(pack))
    for name, parts in run.means.items():
        size = sum(size for _, size in parts)
        graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [size]))
    result.mark_edited()
    return Instrumented(result, tuple(packs), tuple(run.copies), run.means)


@dataclass
class _Run:
    """State that all scopes of one call share; `scopes` counts the graphs so far.

    `axes` are those whose channels are averaged, by tensor of the main graph, `means` as in `Instrumented`.
    """

    facts: Facts
    opset: int
    names: Iterator[str] = field(default_factory=lambda: map("rewriter/range/{}".format, itertools.count()))
    copies: list[tuple[Key, Key]] = field(default_factory=list)
    axes: dict[str, set[int]] = field(default_factory=dict)
    means: dict[str, list[tuple[ChannelKey, int]]] = field(default_factory=dict)
    scopes: int = 0


class _Scope:
    """One graph while its statistics are added."""

    def __init__(self, run: _Run, graph: GraphProto, index: int, parent: _Scope | None = None) -> None:
        self.run = run
        self.parent = parent
        self.graph = graph
        self.index = index
        self.facts = run.facts.scopes[index]
        self.nodes: list[NodeProto] = []
        self.emit = NodeList(run.names, run.opset, self.nodes)
        self.reductions = Reductions(self.emit)
        self.known = {t.name for t in graph.initializer}
        self.lifted: list[PackedStatistics] = []
        self.means: list[tuple[str, ChannelKey, int]] = []

    def instrument(self, unreachable: Collection[int] = ()) -> list[PackedStatistics]:
        """Adds each reduction directly after the tensor that it reads, so that no tensor lives longer."""
        for value in self.graph.input:
            if value.name not in self.known:
                self._measure(value.name)
            self._average(value.name)
        for position, node in enumerate(self.graph.node):
            if position in unreachable:
                self.run.scopes += sum(1 for g in subgraphs(node) for _ in walk_graphs(g))
            else:
                self._visit(node)
        packs = [*self.reductions.finish(), *self.lifted]
        for start in range(0, len(self.means), BLOCK):
            block = self.means[start : start + BLOCK]
            name = self.emit.add("Concat", [vector for vector, *_ in block], axis=0)
            self.run.means[name] = [(key, size) for _, key, size in block]
        replace_items(self.graph.node, self.nodes)
        return packs

    def _visit(self, node: NodeProto) -> None:
        self.nodes.append(node)
        if holds_graphs(node):
            self._lift(node)
        elif node.op_type in RECURRENT:
            self._count_moves(node)
        for name in node.output:
            if node.op_type == "Constant":
                self.known.add(name)
            elif (source := self._copied(node)) is not None:
                self.known.add(name)
                self.run.copies.append(((self.index, name), source))
            else:
                self._measure(name)
            self._average(name)

    def _count_moves(self, node: NodeProto) -> None:
        """Counts how far the states of an LSTM, GRU or RNN move at each step."""
        owner, x = self._owner_key(node), self.facts.get(node.input[0])
        narrow = x is None or x.dtype != TensorProto.FLOAT or self.run.opset < MOVES_OPSET
        if owner is None or narrow or whole(node, self.facts, self.run.opset):
            return
        states = itertools.chain.from_iterable(Recurrence(self.emit, node, TensorProto.FLOAT).directions())
        moves = [
            count_moves_along(self.emit, Moves(owner, owner, number, 0), steps)
            for number, (steps, _) in enumerate(states)
        ]
        self.lifted.append(count_moves(self.emit, moves))

    def _owner_key(self, node: NodeProto) -> Key | None:
        """The first float result of a node."""
        floats = (n for n in node.output if n in self.facts and self.facts[n].dtype in FLOATS)
        return next(((self.index, name) for name in floats), None)

    def _average(self, name: str) -> None:
        """Averages the channels of a tensor that a product by an initializer reads."""
        facts = self.facts.get(name)
        for axis in sorted(self.run.axes.get(name, ())) if self.parent is None else ():
            if facts is None or facts.shape is None or facts.dtype not in FLOATS:
                continue
            size, rank = facts.shape[axis], len(facts.shape)
            if isinstance(size, int) and rank > 1:
                wide = self.reductions.widened(name, facts)
                others = (other for other in range(rank) if other != axis % rank)
                self.means.append((self.emit.over("ReduceMean", wide, *others), (name, axis), size))

    def _copied(self, node: NodeProto) -> Key | None:
        """The measured tensor, of this graph or an enclosing one, whose values a node passes on.

        Its range holds even where the node is in a branch that no sample takes.
        """
        owner = self._owner(node.input[0]) if node.input and node.domain in STANDARD_DOMAINS else None
        source = owner.facts.get(node.input[0]) if owner is not None else None
        if owner is None or source is None or source.dtype not in FLOATS:
            return None
        to = attribute(node, "to") if node.op_type == "Cast" else None
        widened = to is not None and embeds(source.dtype, to)
        return (owner.index, node.input[0]) if widened or node.op_type in SAME_VALUES else None

    def _owner(self, name: str) -> _Scope | None:
        """The scope in which a tensor was measured; None if it was not."""
        scope: _Scope | None = self
        while scope is not None and name not in scope.known:
            scope = scope.parent
        return scope

    def _measure(self, name: str) -> None:
        facts = self.facts.get(name)
        if facts is not None and facts.dtype in FLOATS:
            self.known.add(name)
            self.reductions.measure((self.index, name), facts)

    def _lift(self, node: NodeProto) -> None:
        """Instruments the graphs of `node`, and makes their vectors outputs of it."""
        graphs = list(subgraphs(node))
        # Scan has a batch axis in operator set 8, which no exporter of today writes
        known = {"If", "Loop", *(["Scan"] if self.run.opset >= 9 else [])}
        if node.domain not in STANDARD_DOMAINS or node.op_type not in known:
            self.run.scopes += sum(1 for g in graphs for _ in walk_graphs(g))
            return
        results = len(graphs[0].output) - (node.op_type == "Loop")  # its condition stays inside
        packs = [self._instrument_subgraph(graph, node) for graph in graphs]
        if not any(pack.keys for pack in packs):
            return
        while len(node.output) < results:  # trailing results that were left out
            node.output.append(next(self.run.names))
        outputs = tuple(next(self.run.names) for _ in _NEUTRAL)
        node.output.extend(outputs)
        if node.op_type == "If":
            self._lift_branches(graphs, packs, outputs)
        else:
            self._lift_iterations(node, graphs[0], packs[0], outputs)

    def _instrument_subgraph(self, graph: GraphProto, node: NodeProto) -> PackedStatistics:
        self.run.scopes += 1
        scope = _Scope(self.run, graph, self.run.scopes, self)
        packs = scope.instrument()
        if not packs:
            return PackedStatistics()
        emit = NodeList(self.run.names, self.run.opset, graph.node)
        owner = self._owner_key(node)
        if owner is not None and self.run.opset >= MOVES_OPSET:
            pairs = ((b, a) for b, a in states(node, graph) if _is_fp32(scope, b) and _is_fp32(scope, a))
            moves = [(Moves(owner, (scope.index, after), 0, 0), before, after) for before, after in pairs]
            packs += [count_moves(emit, moves)] if moves else []
        lanes = zip(*(pack.vectors for pack in packs), strict=True)
        return joined(packs, tuple(emit.add("Concat", lane, axis=0) for lane in lanes))

    def _lift_branches(
        self, graphs: Sequence[GraphProto], packs: Sequence[PackedStatistics], outputs: tuple[str, ...]
    ) -> None:
        """Lets each branch yield the vectors of both, with neutral values for the other one."""
        for mine, graph in enumerate(graphs):
            emit, vectors = NodeList(self.run.names, self.run.opset, graph.node), []
            for lane, neutral in enumerate(_NEUTRAL):
                parts = [
                    pack.vectors[lane]
                    if i == mine
                    else emit.constant(np.full(pack.sizes[lane], neutral), np.float32)
                    for i, pack in enumerate(packs)
                    if pack.keys
                ]
                vectors.append(emit.add("Concat", parts, axis=0))
            graph.output.extend(_values(joined(packs, tuple(vectors))))
        self.lifted.append(joined(packs, outputs))

    def _lift_iterations(
        self, node: NodeProto, body: GraphProto, pack: PackedStatistics, outputs: tuple[str, ...]
    ) -> None:
        """Collects one row per iteration in scan outputs; a neutral row covers loops without iterations."""
        body.output.extend(_values(pack))
        for item in node.attribute:
            if item.name in ("scan_output_axes", "scan_output_directions"):
                item.ints.extend([0] * len(outputs))
        vectors = []
        for rows, op, neutral, size in zip(outputs, _OVER_RUNS, _NEUTRAL, pack.sizes, strict=True):
            none = self.emit.constant(np.full((1, size), neutral), np.float32)
            vectors.append(self.emit.over(op, self.emit.add("Concat", [none, rows], axis=0), 0))
        self.lifted.append(replace(pack, vectors=tuple(vectors)))


def _is_fp32(scope: _Scope, name: str) -> bool:
    return name in scope.facts and scope.facts[name].dtype == TensorProto.FLOAT


def _values(pack: PackedStatistics) -> Iterator[ValueInfoProto]:
    for name, size in zip(pack.vectors, pack.sizes, strict=True):
        yield helper.make_tensor_value_info(name, TensorProto.FLOAT, [size])


def _unreachable(graph: GraphProto, refuses: Refuses) -> set[int]:
    """Positions of nodes of the main graph that cannot run, or that depend on one that cannot."""
    missing: set[str] = set()
    nodes: set[int] = set()
    scopes = 1
    for position, node in enumerate(graph.node):
        inner = [g for child in subgraphs(node) for g in walk_graphs(child)]
        refused = refuses(node, 0) or any(refuses(n, scopes + i) for i, g in enumerate(inner) for n in g.node)
        scopes += len(inner)
        if refused or not missing.isdisjoint(reads(node)):
            nodes.add(position)
            missing.update(name for name in node.output if name)
    return nodes
