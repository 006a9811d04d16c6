"""Positions and marks of axes."""

from __future__ import annotations

import math
from collections.abc import Callable

Scale = Callable[[float], float]


def logarithmic(low: float, high: float, start: float, end: float) -> Scale:
    """Maps `low` to `start` and `high` to `end` by their logarithms; what is beyond stays at the ends."""
    first, last = math.log10(low), math.log10(high)

    def place(value: float) -> float:
        if math.isnan(value) or value >= high:
            return end
        share = (math.log10(value) - first) / (last - first) if value > low else 0.0
        return start + share * (end - start)

    return place


def decades(low: float, high: float, most: int) -> list[float]:
    """Powers of ten from `low` to `high`, at most so many."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    step = max(1, math.ceil((last - first + 1) / most))
    return [10.0**power for power in range(first, last + 1, step)]


_POWERS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def power_of_ten(value: float) -> str:
    """`10⁻⁴` for 1e-4."""
    exponent = round(math.log10(value))
    return "1" if exponent == 0 else f"10{str(exponent).translate(_POWERS)}"
