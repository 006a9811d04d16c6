"""The pairs of rows and columns with the least total cost."""

from __future__ import annotations

import numpy as np

from rewriter.ir.model import Array


def assignment(cost: Array) -> Array:
    """The column of each row, so that the sum of their costs is least.

    Shortest augmenting paths, as Jonker and Volgenant describe them (Computing 38, 1987). NumPy is fast
    enough for 2048 rows; SciPy and lap would be 143 MB and 15 MB for this one function.

    Args:
        cost: Finite, [n, n].

    Returns:
        int64 [n], a permutation.
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
