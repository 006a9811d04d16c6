"""Shares of outputs that hold NaN."""

from __future__ import annotations

import numpy as np
import pytest

from rewriter.model import Array
from rewriter.verification.not_finite import nan_outputs

NAN, INF = np.nan, np.inf


@pytest.mark.parametrize(
    ("values", "share"),
    [
        pytest.param([1, 2, 3, 4], None, id="all finite"),
        pytest.param([NAN, 2, 3, 4], 0.25, id="a quarter NaN"),
        pytest.param([-INF, 2, 3, 4], None, id="a masked score"),
        pytest.param([NAN, NAN, INF, INF], 1.0, id="nothing finite"),
        pytest.param([], None, id="empty"),
    ],
)
def test_the_share_of_an_output(values: list[float], share: float | None) -> None:
    found = nan_outputs([{"y": np.array(values, np.float32)}])
    assert found == ({} if share is None else {"y": share})


def test_integers_are_finite() -> None:
    assert nan_outputs([{"y": np.array([1, 2])}]) == {}


def test_the_worst_sample_counts_for_each_output() -> None:
    def sample(nans: int) -> dict[str, Array]:
        return {"good": np.ones(4), "bad": np.array([NAN] * nans + [1.0] * (4 - nans))}

    assert nan_outputs([sample(1), sample(2), sample(0)]) == {"bad": 0.5}
