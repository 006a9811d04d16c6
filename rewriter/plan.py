"""A plan is data: which nodes stay in FP32, why, and on what evidence."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

Precision = Literal["fp32", "fp16", "bf16"]
InputsOutputs = Literal["keep", "fp32", "fp16"]


@dataclass(frozen=True)
class Range:
    """What was measured of one tensor over all samples.

    Attributes:
        low, high: Smallest and largest value (of the finite run of FP32 arithmetic).
        mean_abs: Mean of the absolute values, averaged over the samples.
        finite: False as soon as one NaN or infinity was seen; such a tensor is never in range.
    """

    low: float
    high: float
    mean_abs: float
    finite: bool

    @property
    def absmax(self) -> float:
        """Largest absolute value; infinity if anything was not finite."""
        return max(abs(self.low), abs(self.high)) if self.finite else math.inf

    def scaled(self, exponent: int) -> Range:
        """The range of the same tensor times 2^exponent."""
        factor = 2.0**exponent
        return Range(self.low * factor, self.high * factor, self.mean_abs * factor, self.finite)

    def __str__(self) -> str:
        return f"[{self.low:.4g}, {self.high:.4g}]" + ("" if self.finite else ", NaN or infinity seen")


@dataclass(frozen=True)
class Decision:
    """A node that stays in FP32.

    Attributes:
        node: The node as the user knows it; `op` is its operator.
        key: Identifies it in the model: scope of its graph and first output.
        rule: Short name of the rule, e.g. `overflow`, `unfused-norm`, `epsilon`, `user`.
        reason: One sentence for the user, with the measured range where there is one.
    """

    node: str
    op: str
    key: str
    rule: str
    reason: str
    tensor: str | None = None
    range: Range | None = None


@dataclass(frozen=True)
class Plan:
    """The precision of every node: `precision`, except for those that `decisions` keep in FP32.

    Attributes:
        float_nodes: How many nodes compute on floating-point tensors.
        norms_in_range: Results of reductions, where decomposed norms among them were measured to fit the
            lower precision inside; empty where none was.
        exponents: Scope, tensor and k of what `rescale` multiplied by 2^k.
    """

    precision: Precision
    io: InputsOutputs = "keep"
    decisions: tuple[Decision, ...] = ()
    float_nodes: int = 0
    norms_in_range: frozenset[str] = frozenset()
    exponents: tuple[tuple[int, str, int], ...] = ()
    fp32: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fp32", frozenset(d.key for d in self.decisions))
