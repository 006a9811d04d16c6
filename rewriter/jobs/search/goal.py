"""Goals of a search, and its result."""

from dataclasses import dataclass
from typing import ClassVar

from rewriter.ir.plan import Plan
from rewriter.runtime.metrics.metrics import Metric, named
from rewriter.verification.verdict import Check, remark

NOISE = 0.02
"""Share of a latency by which two runs of one engine differ."""


class _Goal:
    """A goal whose plans are compared by a metric; `option` names the option, and the check."""

    option: ClassVar[str]
    metric: str
    worst: tuple[int, ...] = ()

    @property
    def measure(self) -> Metric:
        return named(self.metric)


@dataclass(frozen=True)
class ErrorLimit(_Goal):
    """A limit for a metric, for every output and sample.

    Attributes:
        worst: Places of the samples with the largest errors so far. Plans are compared on no others, which
            stay unseen; (): on the samples that a search may fit a plan to.
        fp32: The error of the network's own FP32 engine, 0.0 if it is unknown: no plan has much less.
    """

    option = "tolerance"
    tolerance: float
    metric: str = "relative-l2"
    worst: tuple[int, ...] = ()
    fp32: float = 0.0

    def meets(self, value: float) -> bool:
        return self.measure.meets(value, self.tolerance)

    def __str__(self) -> str:
        return f"{self.metric} {'at least' if self.measure.least else 'at most'} {self.tolerance:.3g}"


@dataclass(frozen=True)
class Budget(_Goal):
    """Limit on the latency that a plan adds, as a share of the rules' plan."""

    option = "max-latency-cost"
    share: float
    metric: str = "relative-l2"

    def __str__(self) -> str:
        return f"at most {self.share:.3g} more latency"


Goal = ErrorLimit | Budget


@dataclass(frozen=True)
class Found:
    """The outcome of a search.

    Attributes:
        plan: The best plan for the goal; the rules' plan if there is none.
        value: The metric of `plan`, or of all nodes in FP32 if the goal is not met.
        before: The metric of the rules' plan.
        emulations: Number of whole emulations, the ranking included.
        cost_us: Estimated extra time of `plan` over `base_us`, the time of the rules' plan.
    """

    goal: Goal
    met: bool
    plan: Plan
    value: float
    before: float
    emulations: int
    cost_us: float
    base_us: float
    seconds: float = 0.0

    @property
    def check(self) -> Check:
        """The goal, as a check of the result."""
        kind = type(self.goal).__name__ if self.met else "goal-missed"
        share = self.cost_us / self.base_us if self.base_us else None
        return Check(
            self.goal.option, self.met, remark(kind, share=share, **vars(self)), seconds=self.seconds
        )
