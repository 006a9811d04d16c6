"""The integer programme: exponents that end overflow, with the least loss of small values and few edits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rewriter.rewriting.rescaling.demand import Demand

OVERFLOW = 100.0
"""Cost of a tensor that stays out of range: it keeps its nodes in FP32. The unit is one tensor with
less than four spare binades above the subnormal numbers, for each binade that lacks."""

EDIT = 0.001
"""Cost of one binade in one constant: of equally good solutions the smallest is taken."""

TIME_LIMIT_S = 60.0
"""After that the best solution so far counts; parts of thousands of classes took seconds."""


@dataclass
class _Programme:
    """Columns with costs and bounds, rows over them; all small, and sparse."""

    cost: list[float] = field(default_factory=list)
    integral: list[int] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    rows: list[tuple[dict[int, float], float, float]] = field(default_factory=list)

    def column(self, low: float, high: float, cost: float = 0.0, *, integral: bool = False) -> int:
        self.low.append(low)
        self.high.append(high)
        self.cost.append(cost)
        self.integral.append(int(integral))
        return len(self.cost) - 1

    def row(self, terms: dict[int, float], low: float = -np.inf, high: float = np.inf) -> None:
        self.rows.append((terms, low, high))

    def solve(self) -> list[float] | None:
        """Values of the columns; None if the time was over before there was a solution."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        data = [value for terms, _, _ in self.rows for value in terms.values()]
        columns = [column for terms, _, _ in self.rows for column in terms]
        ends = np.cumsum([0, *(len(terms) for terms, _, _ in self.rows)])
        matrix = csr_array((data, columns, ends), shape=(len(self.rows), len(self.cost)))
        bounds: list[Any] = [self.low, self.high]  # scipy's annotations know of numbers alone
        limits: list[Any] = [[row[1] for row in self.rows], [row[2] for row in self.rows]]
        found = milp(
            self.cost,
            integrality=self.integral,
            bounds=Bounds(*bounds),
            constraints=LinearConstraint(matrix, *limits),
            options={"time_limit": TIME_LIMIT_S},
        )
        return None if found.x is None else [float(value) for value in found.x]


def solve(demands: Mapping[int, Demand], equations: Sequence[Mapping[int, int]]) -> dict[int, int] | None:
    """The exponent of every class that is not 0, so that every equation holds exactly.

    Args:
        demands: The classes that may move; those that an equation names and this does not are 0.
        equations: Coefficients by class.

    Returns:
        None if the solver found no solution in its time.
    """
    programme = _Programme()
    columns = {root: _exponent(programme, demand) for root, demand in demands.items()}
    for equation in equations:
        terms = {columns[root]: float(c) for root, c in equation.items() if root in columns}
        if terms:
            programme.row(terms, 0.0, 0.0)
    values = programme.solve()
    if values is None:
        return None
    exponents = {root: round(values[column]) for root, column in columns.items()}
    return {root: k for root, k in exponents.items() if k} if _holds(exponents, equations) else None


def _exponent(programme: _Programme, demand: Demand) -> int:
    k = programme.column(demand.low, demand.high, integral=True)
    size = programme.column(0, np.inf, EDIT * (1 + demand.weight))
    programme.row({size: 1.0, k: -1.0}, low=0.0)
    programme.row({size: 1.0, k: 1.0}, low=0.0)
    for level, count in _counts(demand).items():  # k <= level, or `left` is 1
        left = programme.column(0, 1, OVERFLOW * count, integral=True)
        programme.row({k: 1.0, left: float(level - demand.high)}, high=float(level))
    for level, weight in demand.floors.items():  # k + lost >= level
        lost = programme.column(0, np.inf, weight)
        programme.row({k: 1.0, lost: 1.0}, low=float(level))
    return k


def _counts(demand: Demand) -> dict[int, int]:
    counts: dict[int, int] = {}
    for level in demand.hazards.values():
        counts[level] = counts.get(level, 0) + 1
    return counts


def _holds(exponents: Mapping[int, int], equations: Sequence[Mapping[int, int]]) -> bool:
    """Whether rounding to integers kept the equations, which a solver's tolerance might not."""
    return all(sum(c * exponents.get(root, 0) for root, c in terms.items()) == 0 for terms in equations)
