"""Nodes that reduce tensors to their statistics, packed into vectors.

Scalars are packed `BLOCK` at a time, and small tensors of one shape are stacked and reduced together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import numpy as np
from onnx import TensorProto

from rewriter.ir.graph.node_list import BLOCK, SEQUENCE_OPSET, NodeList
from rewriter.ir.model.tensors import TensorFacts
from rewriter.ir.plan import Range
from rewriter.runtime.recording.record import EDGES, LAST_PLACE, LEAST_NORMAL, SAMPLED, median_step

Key = tuple[int, str]
"""Index of a graph in the order of `Facts.scopes`, and the tensor's name in it."""

SMALL = 4096  # most elements of a tensor that is stacked: a block of them holds 2 MiB at most

STACK_LEAST = 3  # fewer tensors than this need more nodes stacked than apart

REDUCTIONS = ("ReduceMax", "ReduceMin", "ReduceL1")
"""ONNX Runtime's ReduceMax and ReduceMin ignore a NaN that is not the first element. ReduceL1 propagates
NaN, and sums no opposite infinities, which would give NaN."""


@dataclass(frozen=True)
class PackedStatistics:
    """The statistics of several tensors, in four FP32 vectors."""

    # the tensor of each element of highs, lows and means, which are summed over the runs; or a count of
    # moves, which is in the means
    keys: tuple[Key | Moves, ...] = ()
    # for each tensor, the index into the runs that counts how often its graph ran
    scope_runs: tuple[int, ...] = ()
    runs: int = 0  # length of the vector of runs
    vectors: tuple[str, ...] = ()  # names of highs, lows, means and runs

    @property
    def sizes(self) -> tuple[int, ...]:
        return (len(self.keys),) * 3 + (self.runs,)


def joined(packs: Sequence[PackedStatistics], vectors: tuple[str, ...]) -> PackedStatistics:
    """The packs as one; `vectors` are the concatenations of theirs."""
    keys: list[Key | Moves] = []
    scope_runs: list[int] = []
    runs = 0
    for pack in packs:
        keys += pack.keys
        scope_runs += [runs + index for index in pack.scope_runs]
        runs += pack.runs
    return PackedStatistics(tuple(keys), tuple(scope_runs), runs, vectors)


@dataclass(frozen=True)
class _Scalars:
    """Statistics of one tensor; `size` is its number of elements, or the name of a scalar with it."""

    key: Key
    high: str
    low: str
    total: str
    size: int | str


class Reductions:
    """Collects the tensors of one graph and emits their reductions."""

    def __init__(self, emit: NodeList) -> None:
        self.emit = emit
        self._scalars: dict[bool, list[_Scalars]] = {False: [], True: []}
        self._waiting: dict[tuple[int, ...], list[tuple[Key, str]]] = {}
        self._packs: list[PackedStatistics] = []

    def measure(self, key: Key, facts: TensorFacts) -> None:
        """Reduces a float tensor right after it is computed, to free its memory, or with others if small."""
        source = self.widened(key[1], facts)
        shape = facts.sizes
        if shape is None or not 0 < prod(shape) <= SMALL or self.emit.opset < SEQUENCE_OPSET:
            self._reduce(key, source, shape)
            return
        waiting = self._waiting.setdefault(shape, [])
        waiting.append((key, source))
        if len(waiting) == BLOCK:
            self._packs.append(self._reduce_stack(shape, self._waiting.pop(shape)))

    def widened(self, tensor: str, facts: TensorFacts) -> str:
        if facts.dtype == TensorProto.FLOAT:
            return tensor
        return self.emit.add("Cast", [tensor], to=TensorProto.FLOAT)

    def finish(self) -> list[PackedStatistics]:
        """Reduces the waiting tensors, and packs the other scalars."""
        for shape, waiting in self._waiting.items():
            if len(waiting) >= STACK_LEAST:
                self._packs.append(self._reduce_stack(shape, waiting))
            else:
                for key, source in waiting:
                    self._reduce(key, source, shape)
        return [*self._packs, *(self._packed(block) for block in self._scalars.values() if block)]

    def _reduce(self, key: Key, source: str, shape: tuple[int, ...] | None) -> None:
        high, low, total = (self.emit.add(op, [source], keepdims=0) for op in REDUCTIONS)
        size = self.emit.add("Size", [source]) if shape is None else prod(shape)
        alike = self._scalars[isinstance(size, str)]
        alike.append(_Scalars(key, high, low, total, size))
        if len(alike) == BLOCK:
            self._packs.append(self._packed(alike))
            alike.clear()

    def _reduce_stack(self, shape: tuple[int, ...], waiting: Sequence[tuple[Key, str]]) -> PackedStatistics:
        stacked = self.emit.stack([source for _, source in waiting])
        rows = self.emit.constant([len(waiting), prod(shape)], np.int64)
        matrix = self.emit.add("Reshape", [stacked, rows])
        high, low, total = (self.emit.over(op, matrix, 1) for op in REDUCTIONS)
        size = self.emit.constant(prod(shape), np.float32)
        return self._pack([key for key, _ in waiting], (high, low, total), size)

    def _packed(self, block: Sequence[_Scalars]) -> PackedStatistics:
        """Packs scalars of tensors whose sizes are all known, or all computed."""
        vectors = [self.emit.stack(c) for c in zip(*((s.high, s.low, s.total) for s in block), strict=True)]
        return self._pack([s.key for s in block], vectors, self._sizes([s.size for s in block]))

    def _sizes(self, sizes: Sequence[int | str]) -> str:
        """Numbers of elements, at least 1, so that the mean of an empty tensor is 0."""
        computed = [s for s in sizes if isinstance(s, str)]
        if not computed:
            return self.emit.constant([max(1, s) for s in sizes if isinstance(s, int)], np.float32)
        vector = self.emit.add("Cast", [self.emit.stack(computed)], to=TensorProto.FLOAT)
        return self.emit.add("Max", [vector, self.emit.constant([1] * len(computed), np.float32)])

    def _pack(self, keys: Sequence[Key], vectors: Sequence[str], sizes: str) -> PackedStatistics:
        high, low, total = vectors
        mean = self.emit.add("Div", [total, sizes])
        ran = self.emit.constant([1], np.float32)
        return PackedStatistics(tuple(keys), (0,) * len(keys), 1, (high, low, mean, ran))


MOVES_OPSET = 13  # Min and Max take integers from 12 on, ReduceSum its axes as an input from 13 on


class Moves(NamedTuple):
    """The statistic: the way of a state in steps below one of `EDGES`, in units of FP16's last place.

    A state that moves by less than such a unit stands still in FP16. Half of its way a state goes in steps
    below the median: one that converges is as fast as its first steps, and an unchanged row of a cache does
    not count. The ways add up over iterations, calls and samples, as other statistics do.
    """

    owner: Key  # first float result of the Loop, Scan or recurrent operator
    state: Key  # the body's output, or the owner again, and the number of the state
    number: int
    edge: int


def count_moves(emit: NodeList, states: Sequence[tuple[Moves, str, str]]) -> PackedStatistics:
    """Adds up the moves of states between tensors, before and after; these may have any shape."""
    counts = [_count(emit, before, after) for _, before, after in states]
    keys = tuple(first._replace(edge=edge) for first, *_ in states for edge in range(len(EDGES)))
    none, ran = emit.constant(np.zeros(len(keys)), np.float32), emit.constant([1], np.float32)
    total = emit.add("Concat", counts, axis=0)
    return PackedStatistics(keys, (0,) * len(keys), 1, (none, none, total, ran))


def count_moves_along(emit: NodeList, first: Moves, steps: str) -> tuple[Moves, str, str]:
    """The state before and after each step, from the sequence of states after each."""
    text = f"before = Slice (steps, [0], [-1], [0])  after = Slice (steps, [1], [{2**62}], [0])"
    names = emit.write(text, steps=steps)
    return first, names["before"], names["after"]


def _count(emit: NodeList, before: str, after: str) -> str:
    text = f"""
        a = Reshape (before, [-1])  b = Reshape (after, [-1])
        size = Min (Shape (a), Shape (b))
        half = Div (size, [{2 * SAMPLED}])
        stride = Add (Add (half, half), [1])
        a = Slice (a, [0], size, [0], stride)  b = Slice (b, [0], size, [0], stride)
        unit = Mul (Max (Max (Abs (a), Abs (b)), {LEAST_NORMAL!r}), {LAST_PLACE!r})
        moves = Reshape (Abs (Sub (b, a)), [-1, 1])
        below = Less (Div (moves, Reshape (unit, [-1, 1])), edges)
        moves = Mul (Cast <to = 1> (below), moves)"""  # an odd stride, to meet every unit of 2^k
    edges = emit.constant(EDGES[None], np.float32)
    return emit.over("ReduceSum", emit.write(text, before=before, after=after, edges=edges)["moves"], 0)


def with_steps(ranges: Mapping[Key, Range], counts: Mapping[Moves, float]) -> dict[Key, Range]:
    """The ranges of states, and of the nodes that have them, with their median steps: a node's slowest."""
    found: dict[Key, Range] = {}
    for first in (key for key in counts if key.edge == 0):
        step = median_step([counts[first._replace(edge=edge)] for edge in range(len(EDGES))])
        for key in {first.owner, first.state}:
            known = found.get(key, ranges.get(key))
            if known is not None and step is not None:
                found[key] = replace(known, step=min(step, step if known.step is None else known.step))
    return found
