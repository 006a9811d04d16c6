"""How values spread over powers of two: counted inside the graph, and looked up by share."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import graph, model
from hypothesis import given
from hypothesis import strategies as st

from rewriter.data.ranges.binades import PACKED, SAMPLED, Binades, measure_binades

COPY = graph("g (float[n] x) => (float[n] y) { y = Identity(x) }")


def counted(values: np.ndarray) -> Binades:
    (found,) = measure_binades(COPY, [{"x": values.astype(np.float32)}], ["y"]).values()
    return found


def test_values_are_counted_by_the_power_of_two_below_them() -> None:
    found = counted(np.array([1.5, -1.5, 3.0, 0.3, 0.0, -0.0]))
    assert found == Binades(-2, (0.25, 0.0, 0.5, 0.25))  # zeros lose nothing


@given(st.integers(-100, 100))
def test_every_binade_is_found(exponent: int) -> None:
    assert counted(np.array([1.4 * 2.0**exponent])) == Binades(exponent, (1.0,))


@pytest.mark.parametrize(
    ("share", "exponent"), [(0.0, -4), (0.2, -4), (0.25, -2), (0.5, -2), (0.8, -1), (1.0, 0)]
)
def test_a_quantile_is_the_largest_power_with_few_enough_below(share: float, exponent: int) -> None:
    assert Binades(-4, (0.25, 0.0, 0.5, 0.25)).quantile(share) == exponent


def test_a_large_tensor_is_sampled_evenly_over_channels() -> None:
    channels = np.array([2.0**k * 1.4 for k in range(16)], np.float32)
    found = counted(np.tile(channels, SAMPLED // 4))
    assert found.first == 0
    np.testing.assert_allclose(found.shares, np.full(16, 1 / 16), atol=0.005)


def test_counts_add_up_and_only_needed_nodes_run() -> None:
    count = PACKED + 3
    body = "".join(f"t{i} = Add(x, k) " for i in range(count))
    source = model(
        """<ir_version: 8, opset_import: ["" : 17, "com.example" : 1]>
        g (float[2] x, float[2] z) => (float[2] y) <float k = {1}> { BODY y = com.example.Foo(z) }""".replace(
            "BODY", body
        )
    )
    zeros = np.zeros(2, np.float32)
    feeds = [{"x": np.array(x, np.float32), "z": zeros} for x in ([0, 1], [3, 3])]
    found = measure_binades(source, feeds, [f"t{i}" for i in range(count)])
    assert found == dict.fromkeys((f"t{i}" for i in range(count)), Binades(0, (0.25, 0.25, 0.5)))


def test_zeros_and_unknown_tensors_have_no_binades() -> None:
    assert measure_binades(COPY, [{"x": np.zeros(3, np.float32)}], ["y", "nobody"]) == {}
    assert measure_binades(COPY, [], []) == {}
