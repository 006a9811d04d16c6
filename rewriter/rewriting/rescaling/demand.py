"""What is asked of the exponent of one class: bounds, and what it costs to miss a wish."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_EXPONENT = 32
"""Largest exponent either way: FP16 spans 40 binades, and FP32's 254 hold squares of what is scaled so."""

RESERVE = 4
"""Binades between the mean of a tensor's absolute values and FP16's smallest normal number that are
worth keeping: values 16 times below the mean then keep all their bits."""

VANISHING = 8.0
"""Weight of a divisor or radicand: when its smallest value loses bits, the quotient does."""

SUBNORMAL = 4.0
"""Weight of a tensor whose median or mean leaves the normal range: most of its values lose bits."""


@dataclass
class Demand:
    """What is asked of the exponent k of one class.

    Attributes:
        low, high: Bounds on k. Nothing that fits FP16 leaves it, no constant loses a bit in FP32.
        hazards: Tensors that overflow, with the largest k at which they do not; below 0.
        sunken: Tensors and weights deep among the subnormal numbers, with the smallest k at which they
            are not; above 0.
        floors: How many tensors want k to be at least so large.
        weight: How many constants change if k is not 0.
    """

    low: int = -MAX_EXPONENT
    high: int = MAX_EXPONENT
    hazards: dict[str, int] = field(default_factory=dict)
    sunken: dict[str, int] = field(default_factory=dict)
    floors: dict[int, float] = field(default_factory=dict)
    weight: int = 0

    @property
    def calls(self) -> bool:
        """Whether anything here wants to be scaled."""
        return bool(self.hazards or self.sunken)

    def limit(self, low: int, high: int) -> None:
        """Narrow the bounds; k = 0 always stays possible."""
        self.low = max(self.low, min(low, 0))
        self.high = min(self.high, max(high, 0))

    def floor(self, level: int, weight: float = 1.0) -> None:
        if level > self.low:
            self.floors[level] = self.floors.get(level, 0.0) + weight
