"""Mixed-integer programme for the exponents: bounds and costs of every class, solved by HiGHS.

docs/rescaling.md#how-exponents-are-chosen lists the costs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MAX_EXPONENT = 32
"""Largest absolute exponent. FP16 spans 40 binades; squares of tensors scaled by 2^32 still fit FP32."""

OVERFLOW = 100.0
"""Cost of a tensor that stays out of range, since its nodes stay in FP32. The unit is one binade that one
tensor lacks of its `RESERVE` above the subnormal numbers."""

VANISHING = 8.0
"""Cost per binade of a divisor or radicand whose smallest values lose bits: the quotient then does, too."""

SUBNORMAL = 4.0
"""Cost per binade of a tensor whose median or mean is subnormal: most of its values lose bits."""

EDIT = 0.001
"""Cost of one binade in one constant. It makes the smallest of equally good exponents win."""

TIME_LIMIT_S = 60.0
"""The solver then returns the best solution so far. Thousands of classes need seconds."""


@dataclass
class Demand:
    """Bounds and costs of the exponent k of one class.

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
        """True if a tensor of the class overflows or has sunk."""
        return bool(self.hazards or self.sunken)

    def limit(self, low: int, high: int) -> None:
        """Narrow the hard bounds; k = 0 always stays feasible."""
        self.low = max(self.low, min(low, 0))
        self.high = min(self.high, max(high, 0))

    def floor(self, level: int, cost: float = 1.0) -> None:
        """Add a soft lower bound, with its cost per binade."""
        if level > self.low:
            self.floors[level] = self.floors.get(level, 0.0) + cost


@dataclass
class _Programme:
    """Sparse mixed-integer linear programme, built variable by variable."""

    cost: list[float] = field(default_factory=list)
    integral: list[int] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    rows: list[tuple[dict[int, float], float, float]] = field(default_factory=list)

    def variable(self, low: float, high: float, cost: float = 0.0, *, integral: bool = False) -> int:
        """Returns the index of a new variable."""
        self.low.append(low)
        self.high.append(high)
        self.cost.append(cost)
        self.integral.append(int(integral))
        return len(self.cost) - 1

    def constraint(self, terms: dict[int, float], low: float = -np.inf, high: float = np.inf) -> None:
        """Bound a linear combination of variables, given as coefficients by variable."""
        self.rows.append((terms, low, high))

    def solve(self) -> list[float] | None:
        """Values of the variables; None if the time limit passed without a feasible solution."""
        import highspy

        solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("threads", 1)  # the same optimum, however many cores there are
        solver.setOptionValue("time_limit", TIME_LIMIT_S)
        solver.passModel(self._as_lp(highspy))
        solver.run()
        if solver.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return None
        return [float(value) for value in solver.getSolution().col_value]

    def _as_lp(self, highspy: Any) -> Any:
        """The programme as HiGHS takes it, with its rows in compressed form."""
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(self.cost), len(self.rows)
        model.col_cost_, model.col_lower_, model.col_upper_ = map(np.array, (self.cost, self.low, self.high))
        model.row_lower_ = np.array([low for _, low, _ in self.rows])
        model.row_upper_ = np.array([high for _, _, high in self.rows])
        model.integrality_ = [highspy.HighsVarType(kind) for kind in self.integral]
        matrix = model.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.num_col_, matrix.num_row_ = model.num_col_, model.num_row_
        matrix.start_ = np.cumsum([0, *(len(terms) for terms, _, _ in self.rows)])
        matrix.index_ = np.array([column for terms, _, _ in self.rows for column in terms])
        matrix.value_ = np.array([value for terms, _, _ in self.rows for value in terms.values()])
        return model


def solve(demands: Mapping[int, Demand], equations: Sequence[Mapping[int, int]]) -> dict[int, int] | None:
    """Optimal exponents, without those that are 0; every equation holds exactly.

    Args:
        demands: The classes that may be scaled; all others have exponent 0.
        equations: Coefficients by class; each sum of coefficient times exponent is 0.

    Returns:
        None if the solver found no solution within its time limit.
    """
    programme = _Programme()
    variables = {root: _add_exponent(programme, demand) for root, demand in demands.items()}
    for equation in equations:
        terms = {variables[root]: float(c) for root, c in equation.items() if root in variables}
        if terms:
            programme.constraint(terms, 0.0, 0.0)
    values = programme.solve()
    if values is None:
        return None
    exponents = {root: round(values[index]) for root, index in variables.items()}
    # the solver's tolerance may accept values that no longer fit once they are rounded
    exact = all(sum(c * exponents.get(root, 0) for root, c in terms.items()) == 0 for terms in equations)
    return {root: k for root, k in exponents.items() if k} if exact else None


def _add_exponent(programme: _Programme, demand: Demand) -> int:
    k = programme.variable(demand.low, demand.high, integral=True)
    size = programme.variable(0, np.inf, EDIT * (1 + demand.edits))  # |k|
    programme.constraint({size: 1.0, k: -1.0}, low=0.0)
    programme.constraint({size: 1.0, k: 1.0}, low=0.0)
    for level, count in Counter(demand.hazards.values()).items():  # k <= level, unless `left` is 1
        left = programme.variable(0, 1, OVERFLOW * count, integral=True)
        programme.constraint({k: 1.0, left: float(level - demand.high)}, high=float(level))
    for level, cost in demand.floors.items():  # k + missing >= level
        missing = programme.variable(0, np.inf, cost)
        programme.constraint({k: 1.0, missing: 1.0}, low=float(level))
    return k
