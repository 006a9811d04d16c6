"""The cheapest pairs of rows and columns, held to SciPy."""

from __future__ import annotations

import numpy as np
import pytest

from rewriter.ir.model import Array
from rewriter.runtime.figures.assignment import assignment


def _swapped_rows() -> Array:
    points = np.random.default_rng(3).normal(size=(300, 8))
    others = points[np.roll(np.arange(300), 7)] + 1e-3
    return np.asarray(((points[:, None] - others[None]) ** 2).sum(axis=2))


@pytest.mark.parametrize(
    "cost",
    [
        np.array([[5.0]]),
        np.array([[1.0, 2.0], [1.0, 9.0]]),
        np.zeros((6, 6)),
        np.random.default_rng(0).random((60, 60)),
        np.random.default_rng(1).integers(0, 3, (40, 40)).astype(np.float64),
        np.random.default_rng(2).normal(size=(40, 40)) * 1e6,
        _swapped_rows(),
    ],
    ids=["one row", "two rows want one column", "all alike", "random", "many ties", "negative", "detections"],
)
def test_the_total_cost_is_the_least(cost: Array) -> None:
    optimize = pytest.importorskip("scipy.optimize", reason="SciPy is not installed: pip install '.[dev]'")
    columns = assignment(cost)
    assert sorted(columns) == list(range(len(cost)))
    rows, best = optimize.linear_sum_assignment(cost)
    assert np.isclose(cost[np.arange(len(cost)), columns].sum(), cost[rows, best].sum(), rtol=1e-12)
