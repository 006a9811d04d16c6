"""What a search shall reach, and what it found."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rewriter.metrics import METRICS, Metric
from rewriter.plan import Plan


@dataclass(frozen=True)
class Goal:
    """What the plan shall reach: a value of a metric of `METRICS`, for every output and sample."""

    tolerance: float
    metric: str = "relative-l2"

    @property
    def measure(self) -> Metric:
        return METRICS[self.metric]

    def meets(self, value: float) -> bool:
        return self.measure.meets(value, self.tolerance)

    def __str__(self) -> str:
        return f"{self.metric} {'at least' if self.measure.least else 'at most'} {self.tolerance:.3g}"


@dataclass(frozen=True)
class Found:
    """The outcome of a search.

    Attributes:
        plan: The cheapest that meets the goal; the rules' plan if none does.
        value: The metric of `plan`, as evaluated.
        before: That of the rules' plan.
        weights: That of FP32 arithmetic with the rounded weights of MatMul, Conv and their like alone; None
            if not measured.
        emulations: How many whole emulations were run, the one for the errors of the nodes included.
        cost_us: Extra time of `plan` over that of the rules' plan.
        origin: Where `cost_us` comes from, e.g. "recorded on an H200, not measured here".
    """

    plan: Plan
    met: bool
    value: float
    before: float
    weights: float | None
    emulations: int
    cost_us: float
    goal: Goal
    origin: str

    @property
    def summary(self) -> str:
        """One sentence for the user."""
        if self.weights is not None and not self.goal.meets(self.weights):
            return (
                f"{self.goal} cannot be met: rounding the weights alone gives {self.weights:.3g}, with all "
                "arithmetic and all other constants in FP32"
            )
        if not self.met:
            return f"{self.goal} cannot be met: with every node in FP32 it is {self.value:.3g}"
        told = f"{self.goal} is met: {self.value:.3g}, {self.before:.3g} before; {self.emulations} emulations"
        return f"{told}; estimated cost {self.cost_us:.3g} us ({self.origin})"


def most_emulations(nodes: int) -> int:
    """Upper bound of `Found.emulations`: 3 to begin with, bisection, and two passes of giving back."""
    return 4 + 3 * max(1, math.ceil(math.log2(nodes + 1)))
