"""Shares of outputs that hold NaN."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import graph

from rewriter.model import Array
from rewriter.verification.not_finite import first_nan, nan_outputs

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


@pytest.mark.parametrize(
    ("body", "first"),
    [
        pytest.param(
            "i = Shape(x) a = Neg(x) b = Log(a) y = Exp(b)", "Log(b) (Log)", id="NaN after an integer"
        ),
        pytest.param(
            "a = Reciprocal(z) b = Log(z) c = Sub(b, b) y = Add(c, a)",
            "Sub(c) (Sub)",
            id="NaN before infinity",
        ),
        pytest.param("a = Neg(z) y = Reciprocal(a)", "Reciprocal(y) (Reciprocal)", id="infinity alone"),
        pytest.param("a = Neg(x) y = Exp(a)", "", id="neither"),
    ],
)
def test_the_first_node_whose_result_is_not_finite(body: str, first: str) -> None:
    model = graph(f"g (float[2] x, float[2] z) => (float[2] y) {{ {body} }}")
    assert first_nan(model, [{"x": np.ones(2, np.float32), "z": np.zeros(2, np.float32)}]) == first
