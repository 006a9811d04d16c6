"""Nodes that reduce tensors to their statistics, packed into vectors.

ONNX Runtime's load time grows faster than linearly in the nodes and outputs of a graph, and in the inputs
of one node (measured on 1.31). So scalars are packed `BLOCK` at a time, and small tensors of one shape are
stacked and reduced together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from onnx import TensorProto

from rewriter.ir.graph.node_list import SEQUENCE_OPSET, NodeList
from rewriter.ir.model.tensors import TensorFacts

if TYPE_CHECKING:
    from rewriter.runtime.ranges.steps import Moves

Key = tuple[int, str]
"""Index of a graph in the order of `Facts.scopes`, and the tensor's name in it."""

BLOCK = 128
"""Tensors that are packed together: the fastest of 10, 32, 128 and 512 on a graph of 8,000."""

SMALL = 4096
"""Most elements of a tensor that is stacked: a block of them holds 2 MiB at most."""

STACK_LEAST = 3
"""Fewer tensors than this need more nodes stacked than apart."""

REDUCTIONS = ("ReduceMax", "ReduceMin", "ReduceL1")
"""ONNX Runtime's ReduceMax and ReduceMin ignore a NaN that is not the first element. ReduceL1 propagates
NaN, and sums no opposite infinities, which would give NaN."""


@dataclass(frozen=True)
class PackedStatistics:
    """The statistics of several tensors, in four FP32 vectors.

    Attributes:
        keys: The tensor of each element of highs, lows and means, which are summed over the runs; or a count
            of moves, which is in the means.
        scope_runs: For each tensor, the index into the runs that counts how often its graph ran.
        runs: Length of the vector of runs.
        vectors: Names of highs, lows, means and runs.
    """

    keys: tuple[Key | Moves, ...] = ()
    scope_runs: tuple[int, ...] = ()
    runs: int = 0
    vectors: tuple[str, ...] = ()

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
