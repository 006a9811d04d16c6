"""compensate-rounding: weights compensate the rounding error of a bias."""

from __future__ import annotations

import numpy as np
import pytest
from weighted import compensated, error, on_grid, related, to_nearest, weighted, weights

from rewriter.model import Array, Model

CONV = weighted(
    "g (float[2,8,12,12] x) => (float[2,16,12,12] y) { y = Conv<group = 2, pads = [1, 1, 1, 1]>(x, w, b) }",
    w=(16, 4, 3, 3),
    b=(16,),
)
GEMM = "g (float[96,48] x) => (float[96,24] y) { y = Gemm<transB = 1>(x, w, b) }"


def after_relu(*shape: int, seed: int, axis: int = -1) -> Array:
    """Activations with a mean, as after a Relu."""
    found: Array = np.maximum(related(*shape, seed=seed, axis=axis), 0)
    return found


def with_bias(source: Model, scale: float) -> Model:
    """The model with its bias multiplied by a factor."""
    source = source.copy()
    stored = next(t for t in source.proto.graph.initializer if t.name == "b")
    stored.CopyFrom(source.detached_tensor("b", source.array(stored) * np.float32(scale)))
    return source


@pytest.mark.parametrize(
    ("source", "shape", "axis"),
    [
        pytest.param(CONV, (2, 8, 12, 12), 1, id="Conv of two groups"),
        pytest.param(weighted(GEMM, w=(24, 48), b=(24,)), (96, 48), -1, id="Gemm"),
    ],
)
@pytest.mark.parametrize("unit", [1e-3, 1.0, 1e3])
def test_weights_compensate_a_large_bias(
    source: Model, shape: tuple[int, ...], axis: int, unit: float
) -> None:
    """Folded BatchNormalization leaves biases larger than the product; its units do not matter."""
    source = with_bias(source, 20.0 * unit)
    feeds = [{"x": np.float32(unit) * after_relu(*shape, seed=seed, axis=axis)} for seed in range(4)]
    result, report = compensated(source, *feeds[:3])
    assert report.changes
    found = weights(result)
    assert on_grid(found["w"]) and on_grid(found["b"])
    np.testing.assert_array_equal(found["b"], weights(to_nearest(source))["b"])
    assert error(source, result, feeds[3]) < 0.5 * error(source, to_nearest(source), feeds[3])


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(GEMM.replace("transB = 1", "transB = 1, beta = 0.5"), id="a bias that is scaled"),
        pytest.param(
            "g (float[96,48] x) => (float[96,24] y, float[96,24] z)"
            " { y = Gemm<transB = 1>(x, w, b)  z = Add(y, b) }",
            id="another node reads it",
        ),
    ],
)
def test_a_bias_with_other_uses_is_unchanged(text: str) -> None:
    source = weighted(text, w=(24, 48), b=(24,))
    feeds = [{"x": after_relu(96, 48, seed=seed)} for seed in range(3)]
    result, report = compensated(source, *feeds)
    assert report.changes and on_grid(weights(result)["w"])
    np.testing.assert_array_equal(weights(result)["b"], weights(source)["b"])


def test_a_weight_is_rounded_without_a_bias_beyond_the_range() -> None:
    source = with_bias(weighted(GEMM, w=(24, 48), b=(24,)), 1e6)
    feeds = [{"x": after_relu(96, 48, seed=seed)} for seed in range(3)]
    result, report = compensated(source, *feeds)
    assert report.changes and on_grid(weights(result)["w"])
    np.testing.assert_array_equal(weights(result)["b"], weights(source)["b"])
