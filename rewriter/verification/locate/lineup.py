"""The tensors that two models have in common, and how they depend on one another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rewriter.graph import label, reads
from rewriter.graph.float_types import logical_name
from rewriter.model import Model
from rewriter.model.facts import FLOATS, Facts, Shape

TYPICAL = 64
"""Stands for a dimension that is not known, where memory is reckoned."""


@dataclass(frozen=True)
class Shared:
    """A float tensor of the other model whose value the original has, too.

    Attributes:
        name, exact: Its names in the other model and in the original.
        node, op: The node of the other model that makes it.
        parents: Positions in `Lineup.tensors` of the shared tensors that it is computed from, with nothing
            shared in between.
        size: Elements.
    """

    name: str
    exact: str
    node: str
    op: str
    parents: tuple[int, ...]
    size: int


@dataclass(frozen=True)
class Lineup:
    """Shared tensors in topological order."""

    tensors: tuple[Shared, ...]

    @cached_property
    def last_use(self) -> tuple[int, ...]:
        """Position of the last tensor that reads each; past the end if none does (an output)."""
        found = [len(self.tensors)] * len(self.tensors)
        seen = [-1] * len(self.tensors)
        for position, tensor in enumerate(self.tensors):
            for parent in tensor.parents:
                seen[parent] = position
        return tuple(s if s >= 0 else f for s, f in zip(seen, found, strict=True))

    def leading_to(self, names: Iterable[str]) -> Lineup:
        """The tensors that some tensors are computed from, and these."""
        wanted = {i for i, t in enumerate(self.tensors) if t.name in set(names)}
        for position in range(len(self.tensors) - 1, -1, -1):
            if position in wanted:
                wanted.update(self.tensors[position].parents)
        places = {old: new for new, old in enumerate(sorted(wanted))}
        return Lineup(
            tuple(
                Shared(t.name, t.exact, t.node, t.op, tuple(places[p] for p in t.parents), t.size)
                for t in (self.tensors[old] for old in sorted(wanted))
            )
        )

    def path(self, start: int, end: int) -> list[int]:
        """A shortest chain of positions from one tensor to another that is computed from it."""
        came: dict[int, int] = {end: end}
        queue = [end]
        for position in queue:
            if position == start:
                break
            for parent in self.tensors[position].parents:
                if parent >= start and parent not in came:
                    came[parent] = position
                    queue.append(parent)
        chain = [start]
        while start in came and chain[-1] != end:
            chain.append(came[chain[-1]])
        return chain


def line_up(original: Model, other: Model, facts: tuple[Facts, Facts]) -> Lineup:
    """Match tensors of the main graphs by name, and by the name that they had before their type changed.

    Constants and what is computed from them alone are left out.

    Args:
        facts: Of `original` and of `other`.
    """
    exact = {name for node in original.proto.graph.node for name in node.output if name}
    varying: dict[str, frozenset[int]] = {port.name: frozenset() for port in other.signature.inputs}
    found: list[Shared] = []
    for node in other.proto.graph.node:
        inputs = [name for name in reads(node) if name in varying]
        if not inputs:
            continue
        parents = frozenset[int]().union(*(varying[name] for name in inputs))
        for name in node.output:
            match = name if name in exact else logical_name(name)
            varying[name] = parents
            if name and match in exact and _comparable(facts, match, name):
                varying[name] = frozenset({len(found)})
                size = _size(facts[1].main[name].shape)
                found.append(Shared(name, match, label(node), node.op_type, tuple(sorted(parents)), size))
    return Lineup(tuple(found))


def _comparable(facts: tuple[Facts, Facts], exact: str, name: str) -> bool:
    mine, yours = facts[0].main.get(exact), facts[1].main.get(name)
    if mine is None or yours is None or not {mine.dtype, yours.dtype} <= FLOATS:
        return False
    return _may_be_equal(mine.shape, yours.shape)


def _may_be_equal(mine: Shape | None, yours: Shape | None) -> bool:
    if mine is None or yours is None:
        return True
    pairs = zip(mine, yours, strict=False)
    known = all(a == b or not (isinstance(a, int) and isinstance(b, int)) for a, b in pairs)
    return len(mine) == len(yours) and known


def _size(shape: Shape | None) -> int:
    return int(np.prod([d if isinstance(d, int) else TYPICAL for d in shape or ()], dtype=np.int64))


def worst(errors: Mapping[str, float], names: Sequence[str]) -> str:
    """The name with the largest error; NaN counts as infinite."""
    return max(names, key=lambda n: np.inf if np.isnan(errors[n]) else errors[n])
