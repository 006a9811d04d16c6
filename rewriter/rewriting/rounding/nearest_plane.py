"""Rounds the weights of a product together by Babai's nearest-plane algorithm, so that their errors cancel.

For y = X W with sampled rows X, rounded weights Q err by ||X (Q - W)||. With the Gram matrix H = X^T X and
its Cholesky factor R, H = R^T R, that is ||R (Q - W)||: R Q is a point near R W in the lattice with basis R.
The algorithm rounds input channels from the last to the first. Each goes to the grid number nearest to its
weight plus the correction for the errors of the channels already rounded.

GPTQ (Frantar et al. 2022, arXiv 2210.17323) is the same algorithm in the opposite order of channels; this
form needs no inverse of H (Chen et al. 2025, arXiv 2507.18553).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rewriter.model import Array
from rewriter.rewriting.rounding.grid import Grid

BLOCK = 64
"""Input channels rounded before their errors are passed on in one matrix product: 32 and 128 took about as
long on matrices of 768 to 4608 channels."""

STRIP = 8
"""Input channels of a block rounded one by one before their errors are passed on within the block."""

LEAST_DAMPING, MOST_DAMPING = 0.01, 3.0
"""Limits of the damping, a share of the mean of H's diagonal that is added to it; 0.01 is GPTQ's. It makes H
positive definite, and bounds the errors in directions that the rows do not contain."""

FEW_ROWS = 0.1
"""Damping for as many rows as channels (docs/weights.md#constants)."""

WIDEST = 1024
"""Largest number of channels for which fewer rows than channels still use the dense factor."""


def round_together(weights: Array, factor: Factor, grid: Grid) -> Array:
    """Returns the weights on the grid, with the error of each compensated by those of earlier channels.

    Zeros stay zero and no weight changes its sign: both may have a meaning, as in a filter bank before a Log.

    Args:
        weights: W, float32 [groups, K, N], finite.
        factor: Of the Gram matrix of the rows that multiply W; see `cholesky`.

    Returns:
        Q, float32 [groups, K, N].
    """
    rounded, corrections = np.empty_like(weights), factor.corrections(weights.shape[2])
    for start, end in reversed(list(_blocks(weights.shape[1]))):
        correction, inside = corrections.block(start, end), factor.diagonal(start, end)
        given, found = weights[:, start:end], rounded[:, start:end]
        low, high = grid.of_sign(given)
        errors = np.empty_like(correction)
        for first, last in reversed(list(_blocks(end - start, STRIP))):
            for k in range(last - 1, first - 1, -1):
                value = correction[:, k]
                if k + 1 < last:
                    value += (inside[:, k : k + 1, k + 1 : last] @ errors[:, k + 1 : last])[:, 0]
                value += given[:, k]
                grid.round_within(value, low[:, k], high[:, k], found[:, k])
                np.subtract(given[:, k], found[:, k], out=errors[:, k])
            correction[:, :first] += inside[:, :first, first:last] @ errors[:, first:last]
        corrections.add(start, end, errors)
    return rounded


def damping(rows: int, channels: int) -> float:
    """Share of the mean of H's diagonal: fewer rows say less about unseen data, so they are damped more."""
    return min(MOST_DAMPING, max(LEAST_DAMPING, FEW_ROWS * (channels / rows) ** 2))


def cholesky(rows: Array) -> Factor | None:
    """Returns the Cholesky factor of H = X^T X + damping, in the form that is cheaper for the shape of X.

    Args:
        rows: X, float32 [groups, rows, K], finite.

    Returns:
        None if a group of X is all zero, or too large for H to fit float32.
    """
    groups, count, channels = rows.shape
    with np.errstate(over="ignore"):
        mean = np.square(rows).sum(axis=(1, 2)) / channels
    if not (np.isfinite(mean).all() and (mean > np.finfo(np.float32).tiny).all()):
        return None
    share = damping(count, channels)
    # operations per weight: K with the dense form, 4 n with the low-rank form; to factorise: K^3 / 3, 4 K n^2
    if groups == 1 and (3 * count < channels or count < channels > WIDEST):
        return LowRank.of(rows[0], share * float(mean[0]))
    return Dense.of(rows, share * mean)


def _blocks(channels: int, size: int = BLOCK) -> Iterator[tuple[int, int]]:
    """Start and end of each block of channels."""
    for start in range(0, channels, size):
        yield start, min(start + size, channels)


@dataclass(frozen=True)
class Dense:
    """R as one array: K^3 / 3 operations.

    Attributes:
        triangle: R, each row divided by its diagonal element, float32 [groups, K, K].
    """

    triangle: Array

    @classmethod
    def of(cls, rows: Array, damping: Array) -> Dense:
        # float32 lacks digits for small eigenvalues if a few channels are 1000 times larger than the others
        gram = (rows.transpose(0, 2, 1) @ rows).astype(np.float64)
        np.einsum("gkk->gk", gram)[:] += damping[:, np.newaxis]
        lower = np.linalg.cholesky(gram)
        del gram
        lower /= np.einsum("gkk->gk", lower)[:, np.newaxis, :]
        return cls(lower.astype(np.float32).transpose(0, 2, 1))

    def diagonal(self, start: int, end: int) -> Array:
        """The block of R on the diagonal, float32 [groups, end - start, end - start]."""
        return np.ascontiguousarray(self.triangle[:, start:end, start:end])

    def corrections(self, columns: int) -> _DenseCorrections:
        groups, channels, _ = self.triangle.shape
        return _DenseCorrections(self.triangle, np.zeros((groups, channels, columns), np.float32))


@dataclass(frozen=True)
class _DenseCorrections:
    """Corrections for W [groups, K, N], kept for all channels."""

    triangle: Array
    sums: Array

    def block(self, start: int, end: int) -> Array:
        """Corrections of a block, float32 [groups, end - start, N]; the caller may change them."""
        return self.sums[:, start:end]

    def add(self, start: int, end: int, errors: Array) -> None:
        """Pass on the errors W - Q of a block, float32 [groups, end - start, N], to all earlier channels."""
        self.sums[:, :start] += self.triangle[:, :start, start:end] @ errors


@dataclass(frozen=True)
class LowRank:
    """R in terms of X, for far fewer rows n than channels: 4 K n^2 operations.

    Let F be the channels before a block B, and P = damping (damping + X_F X_F^T)^-1. P removes from a
    residual the part that F can compensate. The Schur complement of H for the block is
    S = X_B^T P X_B + damping = L L^T, and P for the next block is P - Z^T Z with Z = L^-1 X_B^T P (Woodbury).

    Attributes:
        rows: X, float32 [n, K].
        projections: diag(L)^-1 Z of all blocks, float32 [K, n]. Times the residual X (W - Q), they are the
            corrections.
        triangles: diag(L)^-1 L^T of each block by its start, float32 [size, size].
    """

    rows: Array
    projections: Array
    triangles: dict[int, Array]

    @classmethod
    def of(cls, rows: Array, damping: float) -> LowRank:
        # P is at most 1, so float32 changes S by at most K 6e-8 of the mean diagonal, less than the damping
        count, channels = rows.shape
        projections, triangles = np.empty((channels, count), np.float32), {}
        left = np.eye(count, dtype=np.float32)
        for start, end in _blocks(channels):
            part = rows[:, start:end]
            projected = left @ part
            schur = (part.T @ projected).astype(np.float64)
            np.einsum("kk->k", schur)[:] += damping
            lower = np.linalg.cholesky(schur)
            z = np.linalg.inv(lower).astype(np.float32) @ projected.T
            left -= z.T @ z
            diagonal = np.diag(lower)
            np.divide(z, diagonal.astype(np.float32)[:, np.newaxis], out=projections[start:end])
            triangles[start] = np.ascontiguousarray((lower / diagonal).T, np.float32)
        return cls(rows, projections, triangles)

    def diagonal(self, start: int, end: int) -> Array:
        """The block of R on the diagonal, float32 [1, end - start, end - start]."""
        return self.triangles[start][np.newaxis]

    def corrections(self, columns: int) -> _LowRankCorrections:
        return _LowRankCorrections(self, np.zeros((len(self.rows), columns), np.float32))


@dataclass(frozen=True)
class _LowRankCorrections:
    """Corrections for W [1, K, N], computed from the residual X (W - Q) of the channels already rounded."""

    factor: LowRank
    residual: Array

    def block(self, start: int, end: int) -> Array:
        """Corrections of a block, float32 [1, end - start, N]; the caller may change them."""
        correction: Array = (self.factor.projections[start:end] @ self.residual)[np.newaxis]
        return correction

    def add(self, start: int, end: int, errors: Array) -> None:
        """Add the errors W - Q of a block, float32 [1, end - start, N], to the residual."""
        np.add(self.residual, self.factor.rows[:, start:end] @ errors[0], out=self.residual)


Factor = Dense | LowRank
