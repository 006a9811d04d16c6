"""Every metric on outputs whose value is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rewriter.metrics import METRICS
from rewriter.model import Array

A = np.asarray([[3.0, 4.0], [0.0, 0.0]], np.float32)
ROWS = np.asarray([[5, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5]], np.float32)
SWAPPED = np.asarray([[4, 5, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5]], np.float32)


@pytest.mark.parametrize(
    ("name", "expected", "actual", "value"),
    [
        pytest.param("relative-l2", A, A + np.asarray([[0, 0], [0, 0.5]], np.float32), 0.1, id="relative L2"),
        pytest.param(
            "max-abs", A, A - np.asarray([[0.5, 0.25], [0, 0]], np.float32), 0.5, id="largest difference"
        ),
        pytest.param("max-abs", A[:0], A[:0], 0.0, id="nothing to differ"),
        pytest.param("cosine", A, 7 * A, 1.0, id="a multiple has the same direction"),
        pytest.param("cosine", A, A[:, ::-1], 24 / 25, id="an angle"),
        pytest.param("cosine", 0 * A, 0 * A, 1.0, id="two zeros agree"),
        pytest.param("cosine", 0 * A, A, 0.0, id="zero and something do not"),
        pytest.param("psnr", A, A + np.float32(0.04), 40.0, id="1 percent of the span is 40 dB"),
        pytest.param("psnr", A, A, math.inf, id="equal images"),
        pytest.param("top-1", ROWS, SWAPPED, 0.5, id="one of two rows has another winner"),
        pytest.param("top-5", ROWS, SWAPPED, 1.0, id="the same five in another order"),
        pytest.param("top-1", ROWS[0], SWAPPED[0], 0.0, id="one row"),
        pytest.param("relative-l2", np.asarray([3, 4]), np.asarray([3, 3]), 0.2, id="integers"),
    ],
)
def test_values(name: str, expected: Array, actual: Array, value: float) -> None:
    found = METRICS[name].worst({"y": expected}, {"y": actual})
    assert found == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("name", METRICS)
def test_the_worst_output_counts_and_nan_is_worse(name: str) -> None:
    metric = METRICS[name]
    good, bad = {"a": ROWS, "b": ROWS}, {"a": ROWS, "b": -ROWS}
    assert metric.worst(good, good) != metric.worst(good, bad)
    assert metric.meets(metric.worst(good, good), metric.worst(good, bad))
    assert not metric.meets(metric.worst(good, bad), metric.worst(good, good))
    broken = {"a": ROWS, "b": np.where(ROWS == 3, np.float32(np.nan), ROWS)}
    assert not metric.meets(metric.worst(good, broken), metric.worst(good, bad))


def test_an_infinity_of_the_original_is_a_value() -> None:
    mask = np.asarray([-np.inf, 1.0], np.float32)
    assert METRICS["relative-l2"].worst({"y": mask}, {"y": mask}) == 0.0
    assert METRICS["relative-l2"].worst({"y": mask}, {"y": np.asarray([-65504, 1], np.float32)}) == math.inf
