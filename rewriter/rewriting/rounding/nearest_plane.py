"""Rounding all weights of a product together, so that their errors cancel in what it computes.

For y = x W with rows X of x that were seen, rounded weights Q err by ||X (Q - W)||. With H = X^T X that is
||R (Q - W)|| for the triangular R of H = R^T R. So weights are rounded from the last input channel to the
first, each to the number of the grid that is nearest to what the errors behind it leave to be made up. This
is Babai's nearest plane, and GPTQ (Frantar et al. 2022, arXiv 2210.17323) in the opposite order of channels,
without GPTQ's inverse of H (Chen et al. 2025, arXiv 2507.18553).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from rewriter.model import Array

BLOCK = 64
"""Input channels that are rounded before what they leave goes to all others in one product: 32
and 128 took about as long on matrices of 768 to 4608 channels."""

STRIP = 8
"""Input channels of a block that are rounded one by one, before what they leave goes to the rest of it."""

Round = Callable[[Array], Array]
"""Float32 to the nearest numbers of a grid, as float32."""


class Factor(Protocol):
    """R, block by block, with each of its rows divided by its diagonal element."""

    def open(self, columns: int) -> Ledger:
        """Begin to round W with that many columns."""
        ...


class Ledger(Protocol):
    """What the errors of rounded channels leave for the others to make up."""

    def owed(self, start: int, end: int) -> Array:
        """For the channels of a block, float32 [groups, end - start, N]; it may be written to."""
        ...

    def inside(self, start: int, end: int) -> Array:
        """The block of R on the diagonal, float32 [groups, end - start, end - start]."""
        ...

    def settle(self, start: int, end: int, errors: Array) -> None:
        """Hand on W - Q of the block, float32 [groups, end - start, N]."""
        ...


def blocks(channels: int, size: int = BLOCK) -> Iterator[tuple[int, int]]:
    """Start and end of each block of channels, from the first to the last."""
    for start in range(0, channels, size):
        yield start, min(start + size, channels)


def round_together(weights: Array, factor: Factor, nearest: Round) -> Array:
    """The weights on the grid, the errors of each made up for by those before it.

    Args:
        weights: W, float32 [groups, K, N], finite.
        factor: Of the rows that W is multiplied by; see `factors.factor`.

    Returns:
        Q, float32 [groups, K, N].
    """
    rounded, ledger = np.empty_like(weights), factor.open(weights.shape[2])
    for start, end in reversed(list(blocks(weights.shape[1]))):
        owed, inside = ledger.owed(start, end), ledger.inside(start, end)
        errors = np.empty_like(owed)
        for first, last in reversed(list(blocks(end - start, STRIP))):
            for k in range(last - 1, first - 1, -1):
                given = weights[:, start + k]
                rounded[:, start + k] = nearest(given + owed[:, k])
                np.subtract(given, rounded[:, start + k], out=errors[:, k])
                owed[:, first:k] += inside[:, first:k, k, np.newaxis] * errors[:, k, np.newaxis]
            owed[:, :first] += inside[:, :first, first:last] @ errors[:, first:last]
        ledger.settle(start, end, errors)
    return rounded
