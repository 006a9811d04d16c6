"""The triangular factor of H = X^T X + damping, in the form that is cheaper for the shape of X."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rewriter.model import Array
from rewriter.rewriting.rounding.nearest_plane import Factor, Ledger, blocks

LEAST_DAMPING, MOST_DAMPING = 0.01, 3.0
"""What is added to the diagonal of H, as a share of its mean. The least is GPTQ's own. It keeps what was not
seen in the rows from being given away for what was, and H from being singular."""

FEW_ROWS = 0.1
"""The damping where there are as many rows as channels (docs/weights.md). Of a T5 encoder with 256 rows for
768 and 3072 channels, 45 of 48 weights gained and not 24; 1 and 10 everywhere did as well. A ResNet, a NAFNet
and a ViT, with more rows than channels, erred least with 0.01 to 0.1."""

WIDEST = 1024
"""Channels up to which fewer rows than channels still get the whole factor: 591 rows of 1536 took longer."""


def damping(rows: int, channels: int) -> float:
    """As a share of the mean of H's diagonal: the fewer rows, the less of what they say holds for others."""
    return min(MOST_DAMPING, max(LEAST_DAMPING, FEW_ROWS * (channels / rows) ** 2))


def factor(rows: Array) -> Factor | None:
    """The factor for X.

    Args:
        rows: X, float32 [groups, rows, K], finite.

    Returns:
        None if a group of X is all zero, or so large that float32 does not hold H.
    """
    groups, count, channels = rows.shape
    with np.errstate(over="ignore"):
        mean = np.square(rows).sum(axis=(1, 2)) / channels
    if not (np.isfinite(mean).all() and (mean > np.finfo(np.float32).tiny).all()):
        return None
    share = damping(count, channels)
    # operations for each weight: K with the whole factor, 4 n with the slim one; to make it: K^3 / 3, 4 K n^2
    if groups == 1 and (3 * count < channels or count < channels > WIDEST):
        return Slim.of(rows[0], share * float(mean[0]))
    return Square.of(rows, share * mean)


@dataclass(frozen=True)
class Square:
    """The whole factor, [groups, K, K]: K^3 / 3 operations."""

    triangle: Array

    @classmethod
    def of(cls, rows: Array, damping: Array) -> Square:
        # if a few channels are 1000 times the others, float32 has too few digits for small eigenvalues
        moments = (rows.transpose(0, 2, 1) @ rows).astype(np.float64)
        np.einsum("gkk->gk", moments)[:] += damping[:, np.newaxis]
        lower = np.linalg.cholesky(moments)
        del moments
        lower /= np.einsum("gkk->gk", lower)[:, np.newaxis, :]
        return cls(lower.astype(np.float32).transpose(0, 2, 1))

    def open(self, columns: int) -> Ledger:
        groups, channels, _ = self.triangle.shape
        return _SquareLedger(self.triangle, np.zeros((groups, channels, columns), np.float32))


@dataclass(frozen=True)
class _SquareLedger:
    triangle: Array
    debts: Array

    def owed(self, start: int, end: int) -> Array:
        return self.debts[:, start:end]

    def inside(self, start: int, end: int) -> Array:
        return np.ascontiguousarray(self.triangle[:, start:end, start:end])

    def settle(self, start: int, end: int, errors: Array) -> None:
        self.debts[:, :start] += self.triangle[:, :start, start:end] @ errors


@dataclass(frozen=True)
class Slim:
    """The factor's blocks in terms of X, for far fewer rows n than channels: 4 K n^2 operations.

    With F for the channels before a block B, P = damping (damping + X_F X_F^T)^-1 takes from a residual what
    they can make up. What then is left of H in the block is S = X_B^T P X_B + damping = L L^T, and P of the
    next block is P - Z^T Z with Z = L^-1 X_B^T P.

    Attributes:
        rows: X, float32 [n, K].
        shares: diag(L)^-1 Z of all blocks, float32 [K, n]: times the residual X (W - Q) it is what is owed.
        triangles: Of each block by its start, float32 [size, size].
    """

    rows: Array
    shares: Array
    triangles: dict[int, Array]

    @classmethod
    def of(cls, rows: Array, damping: float) -> Slim:
        # P is at most 1: in float32, S errs by K 6e-8 of the mean diagonal at most; the damping is more
        count, channels = rows.shape
        shares, triangles = np.empty((channels, count), np.float32), {}
        left = np.eye(count, dtype=np.float32)
        for start, end in blocks(channels):
            part = rows[:, start:end]
            spread = left @ part
            moments = (part.T @ spread).astype(np.float64)
            np.einsum("kk->k", moments)[:] += damping
            lower = np.linalg.cholesky(moments)
            shadow = np.linalg.inv(lower).astype(np.float32) @ spread.T
            left -= shadow.T @ shadow
            diagonal = np.diag(lower)
            np.divide(shadow, diagonal.astype(np.float32)[:, np.newaxis], out=shares[start:end])
            triangles[start] = np.ascontiguousarray((lower / diagonal).T, np.float32)
        return cls(rows, shares, triangles)

    def open(self, columns: int) -> Ledger:
        return _SlimLedger(self, np.zeros((len(self.rows), columns), np.float32))


@dataclass(frozen=True)
class _SlimLedger:
    factor: Slim
    residual: Array

    def owed(self, start: int, end: int) -> Array:
        owed: Array = (self.factor.shares[start:end] @ self.residual)[np.newaxis]
        return owed

    def inside(self, start: int, end: int) -> Array:
        return self.factor.triangles[start][np.newaxis]

    def settle(self, start: int, end: int, errors: Array) -> None:
        np.add(self.residual, self.factor.rows[:, start:end] @ errors[0], out=self.residual)
