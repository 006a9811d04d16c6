"""Exact rescaling: overflow removed by powers of two that are folded into constants.

A tensor t becomes t * 2^k, what reads it takes the factor back. Significands stay as they are, so
FP32 results are bit-equal as long as nothing leaves FP32's normal range.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rewriter.edits import GraphEditor
from rewriter.hazards.survey import Survey
from rewriter.rescaling.apply import apply
from rewriter.rescaling.classes import ZERO
from rewriter.rescaling.demand import Demand
from rewriter.rescaling.demands import Demands, demands
from rewriter.rescaling.freedom import Freedom, analyse
from rewriter.rescaling.solver import solve

__all__ = ["Part", "Rescaling", "rescale"]


@dataclass(frozen=True)
class Part:
    """What became of one class of tensors that have to be scaled together, and that asked for it.

    Attributes:
        exponent: 0 if it stays as it is.
        saved: Tensors that overflowed, or sank among the subnormal numbers, and do not any more.
        left: Tensors that still overflow.
        size: How many tensors are scaled together.
    """

    exponent: int
    saved: tuple[str, ...]
    left: tuple[str, ...]
    size: int


@dataclass(frozen=True)
class Rescaling:
    """What was done to one graph.

    Attributes:
        parts: One for every class that held an overflow, or something that sank.
        tied: Tensors that overflow and have exponent 0, with the reason where one is known.
        exponents: Of the computed tensors, without those that are 0.
        edits: How many constants and epsilons were given a new value.
        solved: False if the solver found nothing in its time.
    """

    parts: tuple[Part, ...]
    tied: Mapping[str, str]
    exponents: Mapping[str, int]
    edits: int
    solved: bool = True


def rescale(survey: Survey, graph: GraphEditor, *, measured: bool) -> Rescaling:
    """Scale what overflows in one graph by powers of two, through the editor.

    Args:
        survey: The graph with its ranges; made of the same editor.
        measured: Whether there are ranges; without, only constants show what overflows.
    """
    freedom = analyse(graph)
    found = demands(survey, freedom, measured=measured)
    tied = {tensor: freedom.pins.get(tensor, "") for tensor in found.tied}
    equations = freedom.classes.equations()
    chosen = _chosen(found, freedom, equations)
    if not any(demand.calls for demand in chosen.values()):
        return Rescaling((), tied, {}, 0)
    exponents = solve(chosen, equations)
    if exponents is None:
        return Rescaling(_parts(chosen, freedom, {}), tied, {}, 0, solved=False)
    parts = _parts(chosen, freedom, exponents)
    if not any(part.saved for part in parts):
        return Rescaling(parts, tied, {}, 0)
    edits = apply(graph, freedom, exponents)
    of_tensors = {t: exponents.get(freedom.classes.root(n), 0) for t, n in freedom.tensors.items()}
    return Rescaling(parts, tied, {t: k for t, k in of_tensors.items() if k}, edits)


def _chosen(found: Demands, freedom: Freedom, equations: Iterable[Mapping[int, int]]) -> dict[int, Demand]:
    """The classes in connected parts that ask to be scaled, with the constants at their border.

    An equation with a constant of its own binds nothing else: the constant takes up any
    difference. So parts end at weights.
    """
    free = {freedom.classes.root(use.number) for use in freedom.constants}
    free -= {freedom.classes.root(number) for number in freedom.tensors.values()}
    neighbours: dict[int, set[int]] = {}
    for terms in equations:
        if not free & terms.keys():
            for root in terms:
                neighbours.setdefault(root, set()).update(terms)
    reached = {root for root, demand in found.classes.items() if demand.calls} - {ZERO}
    queue = list(reached)
    while queue:
        new = neighbours.get(queue.pop(), set()) - reached
        reached |= new
        queue.extend(new)
    for terms in equations:
        if reached & terms.keys():
            reached |= free & terms.keys()
    return {root: found.classes.get(root) or Demand() for root in sorted(reached)}


def _parts(chosen: Mapping[int, Demand], freedom: Freedom, exponents: Mapping[int, int]) -> tuple[Part, ...]:
    members = freedom.members()
    return tuple(
        _part(demand, exponents.get(root, 0), max(1, len(members.get(root, ()))))
        for root, demand in chosen.items()
        if demand.calls
    )


def _part(demand: Demand, k: int, size: int) -> Part:
    """What an exponent does for those who asked for one."""
    helped = {t: k <= level for t, level in demand.hazards.items()}
    helped |= {t: k >= level for t, level in demand.sunken.items()}
    left = tuple(t for t in demand.hazards if not helped[t])
    return Part(k, tuple(t for t, well in helped.items() if well), left, size)
