"""Chooses the free exponents: the cost of each exponent is a table, and one free exponent at a time moves.

The constraints are no differences, for which a shortest path would do. A constant between two tensors takes
up the difference of their exponents; but a product of two tensors adds them, a square doubles one, and a
score that Softmax fixes makes Q's the opposite of K's. A tensor out of range costs the same by however many
binades it is, so the costs are not convex either. But free exponents have 65 values and few neighbours. Each
is set to its best value in turn. Where a demand stays unmet, the exponents beside it are tried at the values
at which some cost changes, with all others set anew.

docs/rescaling.md#how-exponents-are-chosen lists the costs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from rewriter.ir.model import Array
from rewriter.passes.algorithms.rescaling.exponents import Form

MAX_EXPONENT = 32
"""Largest absolute exponent. FP16 spans 40 binades; squares of tensors scaled by 2^32 still fit FP32."""

OVERFLOW = 100.0
"""Cost of a tensor that stays out of range, since its nodes stay in FP32. The unit is one binade that one
tensor lacks of its `RESERVE` above the subnormal numbers."""

VANISHING = 8.0
"""Cost per binade of a divisor or radicand whose smallest values lose bits: the quotient then does, too."""

SUBNORMAL = 4.0
"""Cost per binade of a tensor whose mean is subnormal: most of its values lose bits."""

EDIT = 0.001
"""Cost of one binade in one constant. It makes the smallest of equally good exponents win."""

BROKEN = 1e7
"""Cost per binade beyond a hard bound: larger than all others, so that no bound is broken in the end."""

WIDEST = 8 * MAX_EXPONENT
"""Bound of the tables: sums of free exponents beyond it are judged as this."""

FREE_VALUES = np.arange(-MAX_EXPONENT, MAX_EXPONENT + 1)


@dataclass
class Demand:
    """Bounds and costs of one exponent k.

    Attributes:
        low, high: Hard bounds on k: nothing that fits FP16 leaves it, no constant loses a bit in FP32.
        hazards: Tensors that overflow, each with the largest k at which it does not; below 0.
        sunken: Tensors and weights deep in the subnormal range, each with the smallest k that lifts them out
            of it; above 0.
        floors: Soft lower bounds on k, each with its cost per binade.
        edits: Number of constants that change if k is not 0.
    """

    low: int = -MAX_EXPONENT
    high: int = MAX_EXPONENT
    hazards: dict[str, int] = field(default_factory=dict)
    sunken: dict[str, int] = field(default_factory=dict)
    floors: dict[int, float] = field(default_factory=dict)
    edits: int = 0

    @property
    def needs_scaling(self) -> bool:
        """True if a tensor overflows or has sunk."""
        return bool(self.hazards or self.sunken)

    def limit(self, low: int, high: int) -> None:
        """Narrows the hard bounds; k = 0 always stays feasible."""
        self.low = max(self.low, min(low, 0))
        self.high = min(self.high, max(high, 0))

    def floor(self, level: int, cost: float = 1.0) -> None:
        """Adds a soft lower bound, with its cost per binade."""
        if level > self.low:
            self.floors[level] = self.floors.get(level, 0.0) + cost

    @cached_property
    def losses(self) -> Array:
        """Costs of every k from -`WIDEST` to `WIDEST`, without those of edits."""
        k = np.arange(-WIDEST, WIDEST + 1)
        total = BROKEN * np.maximum(0, np.maximum(self.low - k, k - self.high))
        for level in self.hazards.values():
            total += OVERFLOW * (k > level)
        for level, cost in self.floors.items():
            total += cost * np.maximum(0, level - k)
        return total

    @cached_property
    def costs(self) -> Array:
        """Costs of every k from -`WIDEST` to `WIDEST`."""
        total: Array = self.losses + EDIT * (1 + self.edits) * np.abs(np.arange(-WIDEST, WIDEST + 1))
        return total

    @property
    def steps(self) -> set[int]:
        """The values of k at which a cost begins."""
        return {0, self.low, self.high, *self.hazards.values(), *self.floors}


def solve(demands: Mapping[Form, Demand], movable: Collection[int]) -> dict[int, int]:
    """The free exponents other than 0 that cost least, as far as such moves find them.

    Args:
        movable: Free exponents that may be chosen; the others stay 0.
    """
    search = _Search(demands, movable)
    search.settle(search.uses)
    while sum(search.improved(free) for free in search.tense()):
        pass
    return {free: k for free, k in search.values.items() if k}


class _Search:
    """Free exponents at their present values, with the forms that each is a part of."""

    def __init__(self, demands: Mapping[Form, Demand], movable: Collection[int]) -> None:
        self.uses: dict[int, list[tuple[Form, int]]] = {free: [] for free in sorted(movable)}
        for form in demands:
            for free, c in form:
                if free in self.uses:
                    self.uses[free].append((form, c))
        self.demands = {form: demands[form] for uses in self.uses.values() for form, _ in uses}
        self.values = {free: 0 for form in self.demands for free, _ in form}

    def settle(self, frees: Iterable[int], held: int | None = None) -> None:
        """Sets free exponents to their best values, then those beside each that moved; not the one held."""
        queue = dict.fromkeys(frees)
        while queue:
            free = next(iter(queue))
            del queue[free]
            costs = self._costs(free)
            best, now = int(np.argmin(costs)), self.values[free] + MAX_EXPONENT
            if free != held and costs[best] < costs[now] - EDIT / 2:
                self.values[free] = best - MAX_EXPONENT
                queue.update(dict.fromkeys(self._beside(free)))

    def tense(self) -> dict[int, None]:
        """The free exponents beside one that has an unmet demand."""
        unmet = (form for form, demand in self.demands.items() if demand.losses[self._place(form)] > EDIT)
        frees = dict.fromkeys(free for form in unmet for free, _ in form if free in self.uses)
        return frees | dict.fromkeys(other for free in frees for other in self._beside(free))

    def improved(self, free: int) -> bool:
        """Tries other values of a free exponent, all others set anew; True if one of them costs less."""
        before = self.values
        for value in self._tries(free):
            self.values = before | {free: value}
            self.settle(self._beside(free), held=free)
            self.settle([free])
            after = self.values
            moved = {form for one, k in after.items() if k != before[one] for form, _ in self.uses[one]}
            gain = -self._total(moved)
            self.values = before
            gain += self._total(moved)
            if gain > EDIT / 2:
                self.values = after
                return True
        return False

    def _tries(self, free: int) -> Iterator[int]:
        """Yields the values at which a form of the free exponent reaches a step of its costs."""
        tries = {
            (step - self._sum(form)) // c + self.values[free]
            for form, c in self.uses[free]
            for step in self.demands[form].steps
        }
        yield from sorted((k for k in tries if -MAX_EXPONENT <= k <= MAX_EXPONENT), key=abs)

    def _beside(self, free: int) -> Iterator[int]:
        return (
            other for form, _ in self.uses[free] for other, _ in form if other != free and other in self.uses
        )

    def _costs(self, free: int) -> Array:
        """Costs of every value of a free exponent."""
        total = np.zeros(len(FREE_VALUES))
        for form, c in self.uses[free]:
            places = self._place(form) + c * (FREE_VALUES - self.values[free])
            total += self.demands[form].costs[np.clip(places, 0, 2 * WIDEST)]
        return total

    def _sum(self, form: Form) -> int:
        return sum(c * self.values[free] for free, c in form)

    def _place(self, form: Form) -> int:
        """The place of a form's exponent in the tables."""
        return min(max(self._sum(form), -WIDEST), WIDEST) + WIDEST

    def _total(self, forms: Iterable[Form]) -> float:
        return sum(float(self.demands[form].costs[self._place(form)]) for form in forms)
