"""A plan is data: which nodes stay in FP32, why, and on what evidence."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

Precision = Literal["fp32", "fp16", "bf16"]
InputsOutputs = Literal["keep", "fp32", "fp16"]
Repair = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class Range:
    """The measured range of one tensor over all samples.

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
    """A node that does not compute in the plan's precision.

    Attributes:
        node: The node as the user knows it; `op` is its operator.
        key: Identifies it in the model: scope of its graph and first output.
        rule: Short name of the rule, e.g. `overflow`, `unfused-norm`, `epsilon`, `user`.
        reason: One sentence for the user, with the measured range where there is one.
        repair: What it computes in instead: FP32, which round a MatMul alone is FP32 accumulation; or BF16,
            which has FP32's range and accumulation at FP16's speed, and 8 bits.
    """

    node: str
    op: str
    key: str
    rule: str
    reason: str
    tensor: str | None = None
    range: Range | None = None
    repair: Repair = "fp32"


@dataclass(frozen=True)
class Plan:
    """The precision of every node: `precision`, except for those of `decisions`.

    Attributes:
        float_nodes: How many nodes compute on floating-point tensors.
        norms_in_range: Results of reductions, where decomposed norms among them were measured to fit the
            lower precision inside; empty where none was.
        exponents: Scope, tensor and k of what `rescale` multiplied by 2^k.
        fp32, bf16: Keys of the nodes in FP32, and of those in BF16.
    """

    precision: Precision
    io: InputsOutputs = "keep"
    decisions: tuple[Decision, ...] = ()
    float_nodes: int = 0
    norms_in_range: frozenset[str] = frozenset()
    exponents: tuple[tuple[int, str, int], ...] = ()
    fp32: frozenset[str] = field(init=False)
    bf16: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        for repair in ("fp32", "bf16"):
            keys = frozenset(d.key for d in self.decisions if d.repair == repair)
            object.__setattr__(self, repair, keys)
