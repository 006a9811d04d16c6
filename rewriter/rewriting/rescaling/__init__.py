"""Exact rescaling: removes overflow by powers of two that are folded into constants.

A tensor t becomes t * 2^k, and its consumers take the factor back. Significands stay as they are, so FP32
results are bit-equal as long as nothing leaves FP32's normal range. docs/rescaling.md has a worked example.

1. `rules`: the linear equations that each operator imposes on the exponents k of its inputs and outputs.
2. `constraints`: these equations for a whole graph; `classes` merges exponents that have to be equal.
3. `demands`: bounds and costs of every class, from measured ranges and from the constants.
4. `programme`: the mixed-integer programme that chooses the exponents.
5. `apply`: multiplies constants and epsilons; `record` notes the exponents in the model's metadata.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rewriter.data.ranges.binades import Binades
from rewriter.graph import GraphEditor, reached
from rewriter.hazards.magnitude import FP16_MIN_NORMAL
from rewriter.hazards.survey import Survey
from rewriter.rewriting.rescaling.apply import apply, apply_planned
from rewriter.rewriting.rescaling.classes import ZERO
from rewriter.rewriting.rescaling.constraints import Constraints, collect
from rewriter.rewriting.rescaling.demands import NOTHING, Demands, demands, in_range
from rewriter.rewriting.rescaling.programme import Demand, solve
from rewriter.rewriting.rescaling.record import record

__all__ = ["RescaledClass", "Rescaling", "apply_planned", "in_range", "record", "rescale", "to_count"]

TAIL = 14
"""Binades below the mean in which values still matter. If values are dense around 0, a share of 2^-TAIL,
6e-5, lies further down."""


@dataclass(frozen=True)
class RescaledClass:
    """Outcome for one class of tensors that needed scaling.

    Attributes:
        exponent: 0 if the class keeps its scale.
        saved: Tensors that overflowed or had sunk, and now are in range.
        left: Tensors that still overflow.
        size: Number of tensors that are scaled together.
    """

    exponent: int
    saved: tuple[str, ...]
    left: tuple[str, ...]
    size: int


@dataclass(frozen=True)
class Rescaling:
    """Outcome for one graph.

    Attributes:
        classes: One entry for every class with a tensor that overflowed or had sunk.
        tied: Tensors that overflow and cannot be scaled, each with the reason if one is known.
        exponents: Exponents other than 0 of the computed tensors.
        edits: Number of constants and epsilons with a new value.
        solved: False if the solver found nothing within its time limit.
    """

    classes: tuple[RescaledClass, ...]
    tied: Mapping[str, str]
    exponents: Mapping[str, int]
    edits: int
    solved: bool = True


@dataclass(frozen=True)
class _Solution:
    """Exponents for one graph, by class; None if the solver found nothing within its time limit."""

    constraints: Constraints
    chosen: dict[int, Demand]
    tied: dict[str, str]
    exponents: dict[int, int] | None

    @property
    def moved(self) -> dict[str, int]:
        """Exponents other than 0 of the computed tensors."""
        known, root = self.exponents or {}, self.constraints.classes.root
        return {t: k for t, number in self.constraints.tensors.items() if (k := known.get(root(number), 0))}


def rescale(
    survey: Survey, graph: GraphEditor, *, measured: bool, spread: Mapping[str, Binades] = NOTHING
) -> Rescaling:
    """Scale tensors of one graph that overflow or have sunk, through the editor.

    Args:
        survey: The graph with its ranges, made with the same editor.
        measured: True if there are ranges; without them, only constants show overflow.
        spread: Counted distributions of values, of the tensors that `to_count` names.
    """
    if measured and in_range(survey):
        return Rescaling((), {}, {}, 0)
    found = _solution(survey, graph, spread, measured=measured)
    classes = _outcomes(found)
    if found.exponents is None or not any(one.saved for one in classes):
        return Rescaling(classes, found.tied, {}, 0, found.exponents is not None)
    edits = apply(graph, found.constraints, found.exponents)
    return Rescaling(classes, found.tied, found.moved, edits)


def to_count(survey: Survey, graph: GraphEditor) -> list[str]:
    """Tensors whose distribution of values matters: a first solution moves them near FP16's subnormals."""
    if in_range(survey):
        return []
    moved = _solution(survey, graph, NOTHING, measured=True).moved
    ranges = ((t, k, survey.range(t)) for t, k in moved.items() if k < 0)
    least = FP16_MIN_NORMAL * 2.0**TAIL
    return [t for t, k, r in ranges if r is not None and r.mean_abs * 2.0**k < least]


def _solution(
    survey: Survey, graph: GraphEditor, spread: Mapping[str, Binades], *, measured: bool
) -> _Solution:
    constraints = collect(graph)
    found = demands(survey, constraints, measured=measured, spread=spread)
    tied = {tensor: constraints.pins.get(tensor, "") for tensor in found.tied}
    equations = constraints.classes.equations()
    chosen = _chosen(found, constraints, equations)
    needed = any(demand.needs_scaling for demand in chosen.values())
    return _Solution(constraints, chosen, tied, solve(chosen, equations) if needed else {})


def _chosen(
    found: Demands, constraints: Constraints, equations: Iterable[Mapping[int, int]]
) -> dict[int, Demand]:
    """The classes connected by equations to one that needs scaling.

    A constant in an equation takes up any difference, so the equation connects nothing else: connected parts
    end at constants.
    """
    root = constraints.classes.root
    free = {root(use.number) for use in constraints.constants}
    free -= {root(number) for number in constraints.tensors.values()}
    needing = {number for number, demand in found.classes.items() if demand.needs_scaling} - {ZERO}
    free -= needing  # a constant that needs scaling itself cannot take up a difference
    neighbours: dict[int, set[int]] = {}
    for terms in equations:
        if not free & terms.keys():
            for number in terms:
                neighbours.setdefault(number, set()).update(terms)
    chosen = set(reached(needing, lambda number: neighbours.get(number, ())))
    for terms in equations:
        if chosen & terms.keys():
            chosen |= free & terms.keys()
    return {number: found.classes.get(number) or Demand() for number in sorted(chosen)}


def _outcomes(found: _Solution) -> tuple[RescaledClass, ...]:
    members = found.constraints.members()
    return tuple(
        _outcome(demand, (found.exponents or {}).get(root, 0), max(1, len(members.get(root, ()))))
        for root, demand in found.chosen.items()
        if demand.needs_scaling
    )


def _outcome(demand: Demand, k: int, size: int) -> RescaledClass:
    helped = {t: k <= level for t, level in demand.hazards.items()}
    helped |= {t: k >= level for t, level in demand.sunken.items()}
    left = tuple(t for t in demand.hazards if not helped[t])
    return RescaledClass(k, tuple(t for t, in_range_now in helped.items() if in_range_now), left, size)
