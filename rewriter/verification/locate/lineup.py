"""Matches the tensors that two models have in common, with their dependencies."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from rewriter.ir.graph import display_name, reads
from rewriter.ir.model import Model
from rewriter.ir.model.tensors import FLOATS, TensorFacts
from rewriter.ir.plan import logical_name


@dataclass(frozen=True)
class SharedTensor:
    """A float tensor of the other model that the original computes, too.

    Attributes:
        name, exact: Its names in the other model and in the original.
        parents: Positions in `Lineup.tensors` of the nearest shared tensors that it is computed from.
    """

    name: str
    exact: str
    node: str
    op: str
    parents: tuple[int, ...]


@dataclass(frozen=True)
class Lineup:
    """Shared tensors in topological order."""

    tensors: tuple[SharedTensor, ...]

    @cached_property
    def last_use(self) -> tuple[int, ...]:
        """Position of the last tensor computed from each tensor; past the end for an output."""
        last = [len(self.tensors)] * len(self.tensors)
        for position, tensor in enumerate(self.tensors):
            for parent in tensor.parents:
                last[parent] = position
        return tuple(last)

    def leading_to(self, names: Iterable[str]) -> Lineup:
        """Returns the lineup of the named tensors and their ancestors."""
        ends = set(names)
        return self._of(self._upstream({i for i, t in enumerate(self.tensors) if t.name in ends}))

    def suspects(self, name: str, right: Container[str]) -> Lineup:
        """Returns the named tensor, and ancestors without a right one between, which may have spoilt it."""
        return self._of(self._upstream({i for i, t in enumerate(self.tensors) if t.name == name}, right))

    def leading_on(
        self, errors: Mapping[str, float], outputs: Container[str], tolerance: float
    ) -> dict[str, float]:
        """Returns the errors without wrong tensors that only lead to right ones: they are other tensors."""
        right = {name for name, error in errors.items() if error <= tolerance}
        ends = {i for i, t in enumerate(self.tensors) if t.name in outputs and t.name not in right}
        kept = right | {self.tensors[i].name for i in self._upstream(ends, right)}
        return {name: error for name, error in errors.items() if name in kept or name in outputs}

    def _upstream(self, positions: set[int], right: Container[str] = ()) -> set[int]:
        """Adds the ancestors of tensors, without right ones and what only leads to these."""
        for position in range(len(self.tensors) - 1, -1, -1):
            if position in positions:
                parents = self.tensors[position].parents
                positions.update(p for p in parents if self.tensors[p].name not in right)
        return positions

    def _of(self, wanted: set[int]) -> Lineup:
        """The tensors at these positions, with their dependencies among each other."""
        indices = {old: new for new, old in enumerate(sorted(wanted))}
        tensors = (self.tensors[old] for old in indices)
        return Lineup(
            tuple(replace(t, parents=tuple(indices[p] for p in t.parents if p in indices)) for t in tensors)
        )

    def path(self, start: int, end: int) -> list[int]:
        """Returns a shortest chain of positions from one tensor to a descendant."""
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


def line_up(original: Model, other: Model) -> Lineup:
    """Matches tensors of the main graphs by name, or by the name before their type changed.

    Constants, and tensors computed only from constants, are skipped.
    """
    mine, yours = original.facts().main, other.facts().main
    exact = {name for node in original.proto.graph.node for name in node.output if name}
    varying: dict[str, frozenset[int]] = {port.name: frozenset() for port in other.signature.inputs}
    tensors: list[SharedTensor] = []
    for node in other.proto.graph.node:
        inputs = [name for name in reads(node) if name in varying]
        if not inputs:
            continue
        parents = frozenset[int]().union(*(varying[name] for name in inputs))
        for name in node.output:
            match = name if name in exact else logical_name(name)
            varying[name] = parents
            if name and match in exact and _comparable(mine.get(match), yours.get(name)):
                varying[name] = frozenset({len(tensors)})
                tensors.append(
                    SharedTensor(name, match, display_name(node), node.op_type, tuple(sorted(parents)))
                )
    return Lineup(tuple(tensors))


def _comparable(mine: TensorFacts | None, yours: TensorFacts | None) -> bool:
    if mine is None or yours is None or not {mine.dtype, yours.dtype} <= FLOATS:
        return False
    if mine.shape is None or yours.shape is None:
        return True
    pairs = zip(mine.shape, yours.shape, strict=False)
    fits = all(a == b or not (isinstance(a, int) and isinstance(b, int)) for a, b in pairs)
    return len(mine.shape) == len(yours.shape) and fits
