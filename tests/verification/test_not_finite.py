"""Shares of outputs that hold NaN."""

import numpy as np
import pytest
from graphs import graph
from tables import values

from rewriter.base.errors import ModelError
from rewriter.ir.model import Array
from rewriter.verification.not_finite import first_nan, nan_outputs, nan_warnings

NAN, INF = np.nan, np.inf


@values
def test_the_share_of_an_output(values: list[float], share: float | None) -> None:
    found = nan_outputs([{"y": np.array(values, np.float32)}])
    assert found == ({} if share is None else {"y": share})


def test_the_worst_sample_counts_for_each_output() -> None:
    def sample(nans: int) -> dict[str, Array]:
        return {"good": np.ones(4), "bad": np.array([NAN] * nans + [1.0] * (4 - nans))}

    assert nan_outputs([sample(1), sample(2), sample(0)]) == {"bad": 0.5}


@pytest.mark.parametrize(
    ("body", "first"),
    [
        pytest.param("i = Shape(x) a = Neg(x) b = Log(a) y = Exp(b)", "Log(b) (Log)", id="NaN at last"),
        pytest.param(
            "a = Reciprocal(z) b = Log(z) c = Sub(b, b) y = Add(c, a)", "Sub(c) (Sub)", id="NaN first"
        ),
        pytest.param("a = Neg(z) y = Reciprocal(a)", "Reciprocal(y) (Reciprocal)", id="infinity alone"),
        pytest.param("a = Neg(x) y = Exp(a)", "", id="neither"),
    ],
)
def test_the_first_node_whose_result_is_not_finite(body: str, first: str) -> None:
    model = graph(f"g (float[2] x, float[2] z) => (float[2] y) {{ {body} }}")
    assert first_nan(model, [{"x": np.ones(2, np.float32), "z": np.zeros(2, np.float32)}]) == first


LOGARITHM = graph("g (float[4] x) => (float[4] y, float[4] z) { y = Log(x) z = Neg(x) }")


def warned(*values: float) -> list[str]:
    x = np.array(values, np.float32)
    with np.errstate(invalid="ignore", divide="ignore"):
        return nan_warnings(LOGARITHM, [{"x": x}], [{"y": np.log(x), "z": -x}])


def test_nan_of_the_original_is_a_warning_with_its_share_and_its_first_node() -> None:
    assert warned(1, 2, 3, 4) == []
    assert warned(-1, 2, 3, 4) == [
        "the original itself gives NaN or infinity on these inputs: y (0.25 of it), first in Log(y) (Log); "
        "only the other elements are verified"
    ]


def test_an_output_without_a_finite_element_leaves_nothing_to_verify() -> None:
    with pytest.raises(ModelError, match=r"^the model: .* y \(1 of it\), first in Log\(y\)") as caught:
        warned(-1, -2, -3, 0)
    assert "nothing to verify against" in str(caught.value.hint)
