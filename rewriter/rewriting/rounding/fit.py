"""Weights of the same rows, rounded together, and judged on rows that they were not fitted to.

A bias is a weight, too: of one more input channel, which is 1 in every row. It is rounded first, to the
nearest number, and what that leaves is made up for by the weights, as far as their inputs have a mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from rewriter.model import Array
from rewriter.rewriting.rounding.factors import factor
from rewriter.rewriting.rounding.grid import Grid
from rewriter.rewriting.rounding.layers import Layer, Left
from rewriter.rewriting.rounding.nearest_plane import round_together
from rewriter.rewriting.rounding.rows import Rows

JUDGED = 256
"""Output channels that are judged together."""

Weights = Mapping[str, Array]


@dataclass(frozen=True)
class Rounded:
    """A weight, and the bias behind it, on the grid.

    Attributes:
        value: Of the weight's shape, in the lower type: the better one of the two.
        bias: Of the bias's shape; None if the layer has none.
        error: ||X (Q - W)|| / ||X W|| on rows X held out, for the weight rounded together.
        nearest: The same for the weight rounded to nearest.
    """

    layer: Layer
    value: Array
    bias: Array | None
    error: float
    nearest: float

    @property
    def gains(self) -> bool:
        """Whether it was worth it."""
        return self.error < self.nearest


def fitted(
    rows: Sequence[Rows | None], found: Sequence[Layer], weights: Weights, grid: Grid
) -> Iterator[Rounded | Left]:
    """Layers that are multiplied by the same rows: one factor serves them all."""
    read = [part.split() for part in rows if part is not None]
    if len(read) < len(rows):
        yield from _left(found, "ONNX Runtime cannot compute what it is multiplied by")
        return
    fit, judged = (np.concatenate(parts, axis=1) for parts in zip(*read, strict=True))
    if not (fit.shape[1] and judged.shape[1]):
        yield from _left(found, "there are too few rows to hold some out")
        return
    one = _one(fit) if any(layer.bias for layer in found) else 0.0
    if one:
        fit, judged = _with_ones(fit, one), _with_ones(judged, one)
    triangle = factor(fit) if np.isfinite(judged).all() else None
    if triangle is None:
        yield from _left(found, "what it is multiplied by is zero, or not finite, on this data")
        return
    matrices = [_matrix(layer, weights, one) for layer in found]
    # channel by channel: of a Conv's weight, as it is stored, a channel would be spread over all of it
    joined = np.ascontiguousarray(np.concatenate(matrices, axis=2))
    rounded = round_together(joined, triangle, grid.nearest)
    start = 0
    for layer, matrix in zip(found, matrices, strict=True):
        columns = rounded[:, :, start : start + matrix.shape[2]]
        start += matrix.shape[2]
        best, error, nearest = _judged(matrix, columns, judged, grid)
        yield Rounded(layer, *_values(layer, best, weights, one, grid), error, nearest)


def _left(found: Iterable[Layer], reason: str) -> Iterator[Left]:
    yield from (Left(layer.node, reason) for layer in found)


def _one(rows: Array) -> float:
    """What stands for 1 in the channel of the bias.

    As large as the others, or the damping would not be theirs, and a power of two: what is divided by it is
    on the grid if it was.
    """
    size = float(np.linalg.norm(rows)) / sqrt(rows.size)
    return 2.0 ** round(np.log2(size)) if 0.0 < size < np.inf else 1.0


def _with_ones(rows: Array, one: float) -> Array:
    """Rows [groups, rows, K + 1]."""
    return np.concatenate([rows, np.full((*rows.shape[:2], 1), one, np.float32)], axis=2)


def _matrix(layer: Layer, weights: Weights, one: float) -> Array:
    """The weight as [groups, K, N]; below it the bias, or zeros if there is none, where there are ones."""
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
    """Weight and bias in the lower type, out of their matrix."""
    channels = matrix.shape[1] - bool(one)
    shape = weights[layer.weight].shape
    value = np.ascontiguousarray(layer.unmatrix(matrix[:, :channels], shape), grid.stored)
    if not layer.bias:
        return value, None
    below = matrix[:, channels] * np.float32(one)
    return value, below.reshape(weights[layer.bias].shape).astype(grid.stored)


def _judged(matrix: Array, columns: Array, rows: Array, grid: Grid) -> tuple[Array, float, float]:
    """The better of two roundings, and the errors of both; some output channels at a time, for the cache."""
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
    """The sum of squares."""
    return float(np.linalg.norm(product)) ** 2
