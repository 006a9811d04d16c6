"""Exact rescaling: removes overflow by powers of two that are folded into constants.

A tensor t becomes t * 2^k, and its consumers take the factor back. Significands stay as they are, so FP32
results are bit-equal as long as nothing leaves FP32's normal range. docs/rescaling.md has a worked example.

1. `rules`: the linear equations that each operator imposes on the exponents k of its inputs and outputs.
2. `exponents`: these equations for a whole graph, solved: every exponent is a sum of free ones.
3. `demands`: bounds and costs of every exponent, from measured ranges and from the constants.
4. `solve`: chooses the free exponents.
5. `apply`: multiplies constants and epsilons, and notes the exponents in the model's metadata.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rewriter.hazards.survey import Survey
from rewriter.ir.graph import reached
from rewriter.passes.algorithms.rescaling.apply import apply, apply_planned, record
from rewriter.passes.algorithms.rescaling.demands import demands, in_range
from rewriter.passes.algorithms.rescaling.exponents import Form, collect
from rewriter.passes.algorithms.rescaling.solve import Demand, solve

__all__ = ["Rescaling", "apply_planned", "in_range", "record", "rescale"]


@dataclass(frozen=True)
class Rescaling:
    """Outcome for one graph.

    Attributes:
        saved: Tensors that overflowed or had sunk and now are in range, by the exponent that they got.
        left: Tensors that still overflow.
        tied: Tensors that overflow and cannot be scaled, each with the reason if one is known.
        exponents: Exponents other than 0 of the computed tensors.
        edits: Number of constants and epsilons with a new value.
    """

    saved: Mapping[int, Sequence[str]] = field(default_factory=dict)
    left: Sequence[str] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    exponents: Mapping[str, int] = field(default_factory=dict)
    edits: int = 0


def rescale(survey: Survey, *, measured: bool) -> Rescaling:
    """Scales tensors of one graph that overflow or have sunk, through its editor.

    Args:
        measured: True if there are ranges; without them, only constants show overflow.
    """
    if measured and in_range(survey):
        return Rescaling()
    constraints = collect(survey.graph)
    forms = constraints.forms()
    known, overflowing = demands(survey, constraints, measured=measured)
    tied = {tensor: constraints.pins.get(tensor, "") for tensor in overflowing}
    demanded = {form: known.get(form, Demand()) for form in (*forms, *known) if form}
    free = solve(demanded, _movable(demanded, forms))
    saved: dict[int, list[str]] = {}
    left: list[str] = []
    for form, demand in demanded.items():
        k = sum(c * free.get(one, 0) for one, c in form)
        left += (tensor for tensor, level in demand.hazards.items() if k > level)
        helped = [tensor for tensor, level in demand.hazards.items() if k <= level]
        if helped := [*helped, *(tensor for tensor, level in demand.sunken.items() if k >= level)]:
            saved.setdefault(k, []).extend(helped)
    if not saved:
        return Rescaling({}, left, tied)
    edits = apply(survey.graph, constraints, free)
    exponents = {t: constraints.exponent(number, free) for t, number in constraints.tensors.items()}
    return Rescaling(saved, left, tied, {tensor: k for tensor, k in exponents.items() if k}, edits)


def _movable(demanded: Mapping[Form, Demand], tensors: Iterable[Form]) -> set[int]:
    """The free exponents that move with one that needs scaling; all else stays.

    A constant takes up any difference, unless it needs scaling itself: it connects no tensors.
    """
    needing = [form for form, demand in demanded.items() if demand.needs_scaling]
    beside: dict[int, set[int]] = {}
    for form in (*tensors, *needing):
        for one, _ in form:
            beside.setdefault(one, set()).update(other for other, _ in form)
    return set(reached(dict.fromkeys(one for form in needing for one, _ in form), lambda one: beside[one]))
