"""Exact rescaling: overflow removed by powers of two that are folded into constants.

A tensor t becomes t * 2^k, what reads it takes the factor back. Significands stay as they are, so
FP32 results are bit-equal as long as nothing leaves FP32's normal range.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rewriter.data.ranges.binades import Binades
from rewriter.graph import GraphEditor
from rewriter.hazards.magnitude import FP16_MIN_NORMAL
from rewriter.hazards.survey import Survey
from rewriter.rewriting.rescaling.apply import apply
from rewriter.rewriting.rescaling.classes import ZERO
from rewriter.rewriting.rescaling.demand import Demand
from rewriter.rewriting.rescaling.demands import NOTHING, Demands, demands, quiet
from rewriter.rewriting.rescaling.freedom import Freedom, analyse
from rewriter.rewriting.rescaling.solver import solve

__all__ = ["Part", "Rescaling", "concerned", "rescale"]


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


@dataclass(frozen=True)
class _Solution:
    """What shall be done to one graph; `exponents` is None if the solver found nothing in its time."""

    freedom: Freedom
    chosen: dict[int, Demand]
    tied: dict[str, str]
    exponents: dict[int, int] | None

    def of(self, number: int) -> int:
        return (self.exponents or {}).get(self.freedom.classes.root(number), 0)


def rescale(
    survey: Survey, graph: GraphEditor, *, measured: bool, spread: Mapping[str, Binades] = NOTHING
) -> Rescaling:
    """Scale what overflows or sinks in one graph by powers of two, through the editor.

    Args:
        survey: The graph with its ranges; made of the same editor.
        measured: Whether there are ranges; without, only constants show what overflows.
        spread: How the values of the tensors that `concerned` names spread.
    """
    if measured and quiet(survey):
        return Rescaling((), {}, {}, 0)
    found = _solution(survey, graph, spread, measured=measured)
    parts = _parts(found.chosen, found.freedom, found.exponents or {})
    solved = found.exponents is not None
    if found.exponents is None or not any(part.saved for part in parts):
        return Rescaling(parts, found.tied, {}, 0, solved)
    edits = apply(graph, found.freedom, found.exponents)
    exponents = {t: k for t, number in found.freedom.tensors.items() if (k := found.of(number))}
    return Rescaling(parts, found.tied, exponents, edits)


def concerned(survey: Survey, graph: GraphEditor) -> list[str]:
    """The tensors of one graph that sink so far that it matters how their values spread.

    Small values are rare `TAIL` binades below the mean; what stays higher than that is not asked for.
    """
    if quiet(survey):
        return []
    found = _solution(survey, graph, NOTHING, measured=True)
    moved = ((t, k) for t, number in found.freedom.tensors.items() if (k := found.of(number)) < 0)
    ranges = ((t, k, survey.range(t)) for t, k in moved)
    least = FP16_MIN_NORMAL * 2.0**TAIL
    return [t for t, k, r in ranges if r is not None and r.mean_abs * 2.0**k < least]


TAIL = 14
"""If values are dense about 0, 2^-TAIL of them lie TAIL binades below the mean: 6e-5."""


def _solution(
    survey: Survey, graph: GraphEditor, spread: Mapping[str, Binades], *, measured: bool
) -> _Solution:
    freedom = analyse(graph)
    found = demands(survey, freedom, measured=measured, spread=spread)
    tied = {tensor: freedom.pins.get(tensor, "") for tensor in found.tied}
    equations = freedom.classes.equations()
    chosen = _chosen(found, freedom, equations)
    called = any(demand.calls for demand in chosen.values())
    return _Solution(freedom, chosen, tied, solve(chosen, equations) if called else {})


def _chosen(found: Demands, freedom: Freedom, equations: Iterable[Mapping[int, int]]) -> dict[int, Demand]:
    """The classes in connected parts that ask to be scaled, with the constants at their border.

    An equation with a constant of its own binds nothing else: the constant takes up any
    difference. So parts end at weights.
    """
    free = {freedom.classes.root(use.number) for use in freedom.constants}
    free -= {freedom.classes.root(number) for number in freedom.tensors.values()}
    reached = {root for root, demand in found.classes.items() if demand.calls} - {ZERO}
    free -= reached  # what shall move itself takes up no difference
    neighbours: dict[int, set[int]] = {}
    for terms in equations:
        if not free & terms.keys():
            for root in terms:
                neighbours.setdefault(root, set()).update(terms)
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
