"""What a failed check says about why it failed."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import graph

from rewriter.checks import Expected, check_structure

DOUBLED = "g (float[4] x) => (float[4] y) { y = Add(x, x) }"


@pytest.mark.parametrize(
    ("size", "told"),
    [
        pytest.param(0.0, "output y: the original gives 0 throughout", id="zeros"),
        pytest.param(1e-40, "output y: the original gives no value above 1e-40", id="too small for FP32"),
        pytest.param(1.0, "", id="values that mean something"),
    ],
)
def test_an_output_without_values_is_named_as_the_reason(size: float, told: str) -> None:
    outputs = [{"y": np.full(4, size, np.float32)}]
    sample = {"x": np.full(4, size or 1.0, np.float32)}
    check = check_structure(Expected(outputs, outputs), graph(DOUBLED), [], [sample])
    assert check.passed is False
    assert len(check.details) == bool(told)
    assert "".join(check.details).startswith(told)
    assert not told or "is the data what the model expects" in check.details[0]


def test_a_check_that_passes_says_nothing() -> None:
    zeros = [{"y": np.zeros(4, np.float32)}]
    sample = {"x": np.zeros(4, np.float32)}
    check = check_structure(Expected(zeros, zeros), graph(DOUBLED), [], [sample])
    assert (check.passed, check.details) == (True, ())
