"""Matches the rows of two results as sets, for detectors whose TopK orders rows by score."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

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


BOX_WIDTHS = range(4, 8)
"""Columns of a table of boxes: corners, with a score, a class and an image."""


def axis_of_rows(name: str, outputs: Mapping[str, Array], axes: Collection[int]) -> int | None:
    """The axis of an output's rows: 1 in [batch, rows, ...], 0 in [rows] or [rows, features]; else None.

    Args:
        axes: Axes on which the model may select rows. Where it may on both, a table as wide as boxes has no
            batch, unless an output [batch, rows, features] has as many of both.
    """
    shape = outputs[name].shape
    if len(shape) not in (1, 2, 3) or not axes:
        return None
    if len(axes) == 1:
        (axis,) = axes
        return axis if axis + 1 <= len(shape) <= axis + 2 else None
    deep = {array.shape[:2] for array in outputs.values() if array.ndim == 3}
    tables = {a.shape[0] for a in outputs.values() if a.ndim == 2 and a.shape[1] in BOX_WIDTHS}
    if len(shape) == 1:
        return 0 if shape[0] in tables else None
    return 0 if len(shape) == 2 and shape not in deep and shape[1] in BOX_WIDTHS else 1


def row_groups(
    expected: Mapping[str, Array], actual: Mapping[str, Array], axes: Mapping[str, Collection[int]]
) -> list[tuple[int, list[str]]]:
    """The axis of rows, and names of finite outputs that have as many of them, in batches of one size.

    One row of each output in a group describes the same detection.

    Args:
        axes: For each output that may have such rows, as for `axis_of_rows`.
    """
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, array in expected.items():
        axis = axis_of_rows(name, expected, axes.get(name, ()))
        if axis is None or array.shape != actual[name].shape or not array.size:
            continue
        if 1 < array.shape[axis] <= MOST_ROWS:
            groups.setdefault(array.shape[: axis + 1], []).append(name)

    def finite(array: Array) -> bool:  # else a row that is left out might hide a NaN or infinity
        return not is_float(array) or bool(np.all(np.isfinite(array)))

    return [
        (len(sizes) - 1, names)
        for sizes, names in groups.items()
        if all(finite(a[n]) for n in names for a in (expected, actual))
    ]


def matched(
    names: Sequence[str], expected: Mapping[str, Array], actual: Mapping[str, Array], axis: int = 1
) -> Iterator[tuple[str, Pair, str]]:
    """Yields each output of a group with its best rows in matching order, and a note for the report."""
    if axis == 0:
        expected, actual = ({name: side[name][None] for name in names} for side in (expected, actual))
    batch, total = expected[names[0]].shape[:2]
    keep = math.ceil(total * SET_SHARE)
    order = list[tuple[Array, Array]]()  # row numbers on both sides of the best pairs
    for i in range(batch):
        cost = np.sum([_distances(expected[n][i], actual[n][i]) for n in names], axis=0)
        columns = assignment(cost)
        best = np.argsort(cost[np.arange(total), columns], kind="stable")[:keep]
        order.append((best, columns[best]))
    for name in names:
        left = np.stack([expected[name][i][rows] for i, (rows, _) in enumerate(order)])
        right = np.stack([actual[name][i][rows] for i, (_, rows) in enumerate(order)])
        pair = Pair(left, right) if axis else Pair(left[0], right[0])
        yield name, pair, f"rows matched as sets, best {keep} of {total}"


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
