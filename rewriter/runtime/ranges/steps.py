"""How far states move from one step of a recurrence to the next, in units of FP16's last place.

A state that moves by less than such a unit stands still in FP16. Half of its way a state goes in steps below
the median: one that converges is as fast as its first steps, and an unchanged row of a cache does not count.
The ways in steps below some limits add up over iterations, calls and samples, as other statistics do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from rewriter.ir.graph.node_list import NodeList
from rewriter.ir.plan import Range
from rewriter.runtime.ranges.reductions import Key, PackedStatistics
from rewriter.runtime.recording.record import EDGES, LAST_PLACE, LEAST_NORMAL, SAMPLED, median_step

FIRST_OPSET = 13
"""Min and Max take integers from 12 on, ReduceSum its axes as an input from 13 on."""


class Moves(NamedTuple):
    """The statistic: the way of a state in steps below one of `EDGES`.

    Attributes:
        owner: First float result of the Loop, Scan or recurrent operator.
        state: The body's output, or the owner again, and the number of the state.
    """

    owner: Key
    state: Key
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
    zero, one, end, back = (emit.constant([n], np.int64) for n in (0, 1, 2**62, -1))
    before = emit.add("Slice", [steps, zero, back, zero])
    return first, before, emit.add("Slice", [steps, one, end, zero])


def _count(emit: NodeList, before: str, after: str) -> str:
    flat = [emit.add("Reshape", [name, emit.constant([-1], np.int64)]) for name in (before, after)]
    size = emit.add("Min", [emit.add("Shape", [name]) for name in flat])
    one, zero = emit.constant([1], np.int64), emit.constant([0], np.int64)
    half = emit.add("Div", [size, emit.constant([2 * SAMPLED], np.int64)])
    stride = emit.add("Add", [emit.add("Add", [half, half]), one])  # odd, to meet every unit of 2^k
    a, b = (emit.add("Slice", [name, zero, size, zero, stride]) for name in flat)
    largest = emit.add("Max", [emit.add("Abs", [a]), emit.add("Abs", [b])])
    unit = emit.add("Max", [largest, emit.constant(LEAST_NORMAL, np.float32)])
    unit = emit.add("Mul", [unit, emit.constant(LAST_PLACE, np.float32)])
    shape = emit.constant([-1, 1], np.int64)
    moves = emit.add("Reshape", [emit.add("Abs", [emit.add("Sub", [b, a])]), shape])
    steps = emit.add("Div", [moves, emit.add("Reshape", [unit, shape])])
    below = emit.add("Less", [steps, emit.constant(EDGES[None], np.float32)])
    return emit.over("ReduceSum", emit.add("Mul", [emit.add("Cast", [below], to=1), moves]), 0)


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
