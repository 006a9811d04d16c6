"""The latency that split products cost."""

from __future__ import annotations

US, US_PER_BYTE = 3.5, 1e-6
"""Extra microseconds of one split product, and of each byte of its FP16 weight, which is read twice more.
Fitted to six networks on an H200 with TensorRT-RTX 1.6.1 (docs/accuracy.md#split-products)."""


def split_us(weight: int) -> float:
    """Extra microseconds of a split product; `weight`: number of elements of its weight."""
    return US + 2 * US_PER_BYTE * weight


def budget_left(share: float, total_us: float, spent_us: float) -> float:
    """The rest of a latency budget, as a share of the latency with split products.

    Args:
        share: The budget, as a share of the latency without split products.
        total_us: The latency with them.
        spent_us: The part of it that they cost.
    """
    return max(0.0, (1.0 + share) * (1.0 - spent_us / total_us) - 1.0) if total_us else share
