"""Matches the rows of two results as sets, for detectors whose TopK orders rows by score."""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from rewriter.ir.model import Array
from rewriter.runtime.metrics.pairwise_error import Pair, is_float

SET_SHARE = 0.95
"""Share of the rows that is compared: queries at the threshold of a TopK come and go."""

SET_FACTOR = 2.0
"""Factor on the tolerance of a comparison as sets. Detections attend to one another, so one exchanged row
moves its neighbours: the TF32 engine of an RT-DETR R101 has an error of 1.0e-2 as a set on one H200."""

MOST_ROWS = 2048
"""Matching costs time with the cube of the rows, and memory with their square (32 MiB at 2048)."""


def row_groups(expected: Mapping[str, Array], actual: Mapping[str, Array]) -> list[list[str]]:
    """Names of finite outputs [batch, rows] or [batch, rows, features] with equal first two dimensions.

    One row of each output in a group describes the same detection.
    """
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, array in expected.items():
        has_rows = array.ndim in (2, 3) and array.shape[0] and 1 < array.shape[1] <= MOST_ROWS
        if has_rows and array.shape == actual[name].shape:
            groups.setdefault(array.shape[:2], []).append(name)

    def finite(array: Array) -> bool:  # else a row that is left out might hide a NaN or infinity
        return not is_float(array) or bool(np.all(np.isfinite(array)))

    return [
        names for names in groups.values() if all(finite(a[n]) for n in names for a in (expected, actual))
    ]


def matched(
    names: Sequence[str], expected: Mapping[str, Array], actual: Mapping[str, Array]
) -> Iterator[tuple[str, Pair, str]]:
    """Yields each output of a group with its best rows in matching order, and a note for the report."""
    batch, total = expected[names[0]].shape[:2]
    keep = math.ceil(total * SET_SHARE)
    order = [_match([(expected[n][i], actual[n][i]) for n in names], keep) for i in range(batch)]
    for name in names:
        left = np.stack([expected[name][i][rows] for i, (rows, _) in enumerate(order)])
        right = np.stack([actual[name][i][rows] for i, (_, rows) in enumerate(order)])
        yield name, Pair(left, right), f"rows matched as sets, best {keep} of {total}"


def _match(pairs: Sequence[tuple[Array, Array]], keep: int) -> tuple[Array, Array]:
    """Row numbers on both sides of the `keep` best pairs; `pairs` hold [rows, ...] of every output."""
    cost = np.sum([_distances(a, b) for a, b in pairs], axis=0)
    left, right = np.arange(len(cost)), assignment(cost)
    best = np.argsort(cost[left, right], kind="stable")[:keep]
    return left[best], right[best]


def _distances(a: Array, b: Array) -> Array:
    """Distances between all rows: squared, in units of the mean squared row of `a`; 0 or 1 if not floats."""
    left, right = a.reshape(len(a), -1), b.reshape(len(b), -1)
    if not is_float(a):
        return np.asarray(np.any(left[:, None] != right[None], axis=2), np.float64)
    left, right = left.astype(np.float64), right.astype(np.float64)
    norms = np.sum(left * left, axis=1)
    squares = norms[:, None] + np.sum(right * right, axis=1)[None] - 2.0 * (left @ right.T)
    return np.asarray(np.maximum(squares, 0.0) / (float(np.mean(norms)) or 1.0))


def assignment(cost: Array) -> Array:
    """The column of each row, int64 [n], so that the sum of their costs is least; `cost` is finite, [n, n].

    Shortest augmenting paths, as Jonker and Volgenant describe them (Computing 38, 1987). NumPy is fast
    enough for 2048 rows; SciPy and lap would be 143 MB and 15 MB for this one function.
    """
    size = len(cost)
    of_rows, of_columns = np.zeros(size), cost.min(axis=0)  # dual prices: no cost is less than their sum
    column_of, row_of = np.zeros(size, np.int64), np.full(size, -1)  # -1: the column is free
    for start in range(size):
        distance, parent = np.full(size, np.inf), np.zeros(size, np.int64)
        open_, row, length, column = np.ones(size, bool), start, 0.0, start
        while row >= 0:
            through = length + cost[row] - of_rows[row] - of_columns
            shorter = open_ & (through < distance)
            distance[shorter], parent[shorter] = through[shorter], row
            column = int(np.where(open_, distance, np.inf).argmin())
            length, row, open_[column] = float(distance[column]), int(row_of[column]), False
        open_[column] = True  # its price stays
        gain = length - distance[~open_]
        of_columns[~open_] -= gain
        of_rows[row_of[~open_]] += gain
        of_rows[start] += length
        while row != start:
            row = int(parent[column])
            row_of[column] = row
            column, column_of[row] = int(column_of[row]), column
    return column_of
