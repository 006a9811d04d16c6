"""Rounds the layers that share rows, and compares the result with rounding to nearest on held-out rows.

A bias is the weight of one more input channel that is 1 in every row. That channel is rounded first, to the
nearest number, and the weights compensate its error as far as their inputs have a mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from rewriter.model import Array
from rewriter.rewriting.rounding.grid import Grid
from rewriter.rewriting.rounding.layers import Layer, Skipped
from rewriter.rewriting.rounding.nearest_plane import cholesky, round_together
from rewriter.rewriting.rounding.rows import Rows

JUDGED = 256
"""Output channels judged at a time, so that they fit the cache."""

Weights = Mapping[str, Array]


@dataclass(frozen=True)
class Rounded:
    """A weight and its bias on the grid.

    Attributes:
        value: The better rounding of the weight, in its shape and the lower type.
        bias: The rounded bias; None if the layer has none.
        error: ||X (Q - W)|| / ||X W|| on held-out rows X, for the weight rounded together.
        nearest: The same for the weight rounded to nearest.
    """

    layer: Layer
    value: Array
    bias: Array | None
    error: float
    nearest: float

    @property
    def gains(self) -> bool:
        """True if rounding together is better than rounding to nearest."""
        return self.error < self.nearest

    def stored(self) -> dict[str, Array]:
        """Weight and bias by name, in the lower type."""
        found = {self.layer.weight: self.value, self.layer.bias: self.bias}
        return {name: value for name, value in found.items() if value is not None}


def fitted(
    rows: Sequence[Rows | None], found: Sequence[Layer], weights: Weights, grid: Grid
) -> Iterator[Rounded | Skipped]:
    """Round layers that are multiplied by the same rows, with one Cholesky factor for all of them."""
    prepared = _prepared(rows, biased=any(layer.bias for layer in found))
    if isinstance(prepared, str):
        yield from (Skipped(layer.node, prepared) for layer in found)
        return
    fit, judged, one = prepared
    factor = cholesky(fit) if np.isfinite(judged).all() else None
    if factor is None:
        reason = "the input is zero, or not finite, on these samples"
        yield from (Skipped(layer.node, reason) for layer in found)
        return
    matrices = [_matrix(layer, weights, one) for layer in found]
    ends = np.cumsum([matrix.shape[2] for matrix in matrices])[:-1]
    # contiguous by input channel: the algorithm reads one channel of all outputs at a time
    joined = np.ascontiguousarray(np.concatenate(matrices, axis=2))
    del matrices
    rounded = round_together(joined, factor, grid)
    parts = zip(found, np.split(joined, ends, axis=2), np.split(rounded, ends, axis=2), strict=True)
    for layer, matrix, columns in parts:
        best, error, nearest = _judged(matrix, columns, judged, grid)
        yield Rounded(layer, *_values(layer, best, weights, one, grid), error, nearest)


def _prepared(rows: Sequence[Rows | None], *, biased: bool) -> tuple[Array, Array, float] | str:
    """Rows to fit, rows to judge, and the value of the bias channel (0: none); or why there are none."""
    read = [part.split() for part in rows if part is not None]
    if len(read) < len(rows):
        return "ONNX Runtime cannot compute its input"
    fit, judged = (np.concatenate(parts, axis=1) for parts in zip(*read, strict=True))
    if not (fit.shape[1] and judged.shape[1]):
        return "there are too few rows to hold some out"
    if not biased:
        return fit, judged, 0.0
    # as large as the other channels, so that the damping suits it; a power of two keeps the grid
    size = float(np.linalg.norm(fit)) / sqrt(fit.size)
    one = 2.0 ** round(np.log2(size)) if 0.0 < size < np.inf else 1.0
    return _with_ones(fit, one), _with_ones(judged, one), one


def _with_ones(rows: Array, one: float) -> Array:
    """Rows [groups, rows, K + 1]."""
    return np.concatenate([rows, np.full((*rows.shape[:2], 1), one, np.float32)], axis=2)


def _matrix(layer: Layer, weights: Weights, one: float) -> Array:
    """The weight as [groups, K, N]; with a bias channel, one more row for the bias or zeros."""
    matrix = layer.matrix(weights[layer.weight])
    if not one:
        return matrix
    below = np.zeros((matrix.shape[0], 1, matrix.shape[2]), np.float32)
    if layer.bias:
        below[:] = weights[layer.bias].reshape(below.shape) / np.float32(one)
    return np.concatenate([matrix, below], axis=1)


def _values(
    layer: Layer, matrix: Array, weights: Weights, one: float, grid: Grid
) -> tuple[Array, Array | None]:
    """Weight and bias in the lower type; the inverse of `_matrix`."""
    channels = matrix.shape[1] - bool(one)
    shape = weights[layer.weight].shape
    value = np.ascontiguousarray(layer.unmatrix(matrix[:, :channels], shape), grid.stored)
    if not layer.bias:
        return value, None
    below = matrix[:, channels] * np.float32(one)
    return value, below.reshape(weights[layer.bias].shape).astype(grid.stored)


def _judged(matrix: Array, columns: Array, rows: Array, grid: Grid) -> tuple[Array, float, float]:
    """The better of two roundings, and the relative L2 errors of both."""
    error = nearest = whole = 0.0
    plain = np.empty_like(columns)
    for start in range(0, matrix.shape[2], JUDGED):
        part = np.s_[:, :, start : start + JUDGED]
        given = np.ascontiguousarray(matrix[part])
        plain[part] = grid.nearest(given)
        error += _square(rows @ (columns[part] - given))
        nearest += _square(rows @ (plain[part] - given))
        whole += _square(rows @ given)
    best, scale = columns if error < nearest else plain, sqrt(whole) or 1.0
    return best, sqrt(error) / scale, sqrt(nearest) / scale


def _square(product: Array) -> float:
    return float(np.linalg.norm(product)) ** 2
