"""The results that everything is compared with: those of exact arithmetic, and as the model's types round."""

import numpy as np
import pytest
from graphs import graph

from rewriter.verification.expected import expected_outputs, selected_axes, with_states

FLOAT = graph("g (float[2] x) => (float[2] y) { a = Neg(x) y = Exp(a) }")
HALF = "g (float16[2] x) => (float16[2] y) { a = Neg(x) y = Exp(a) }"


def test_only_a_model_that_rounds_has_other_results_as_it_is_written() -> None:
    samples = [{"x": np.array([0.1, 0.3], np.float32)}]
    exact = expected_outputs(FLOAT, samples)
    assert exact.as_written is exact.exact
    found = expected_outputs(graph(HALF), [{"x": samples[0]["x"].astype(np.float16)}])
    assert (found.as_written[0]["y"] != found.exact[0]["y"]).any()
    np.testing.assert_allclose(found.as_written[0]["y"], found.exact[0]["y"], rtol=1e-3)


@pytest.mark.parametrize(
    ("shapes", "body", "selects"),
    [
        pytest.param(("1,4", "1,P"), "v, i = TopK(x, k) y = Neg(v)", True, id="rows without a number"),
        pytest.param(("1,4", "1,2"), "v, i = TopK(x, k) y = Neg(v)", True, id="as many rows as it selects"),
        pytest.param(("1,4", "1,1"), "v, i = TopK(x, k) y = ReduceSum(v)", False, id="another count of rows"),
        pytest.param(("1,S", "1,S"), "v, i = TopK(x, k) y = Neg(x)", False, id="as many rows as an input"),
        pytest.param(
            ("1,4", "1,3"),
            "j = ReduceSum(k) v, i = TopK(x, j) y = Neg(v)",
            True,
            id="a number that is computed",
        ),
        pytest.param(
            ("1,4", "1,3"),
            "j = Constant<value_ints = [2]>() v, i = TopK(x, j) y = ReduceSum(v)",
            False,
            id="another number in a Constant",
        ),
        pytest.param(
            ("1,2,4", "1,2,4"), "v, i = TopK(x, k) y = Neg(x)", False, id="experts of each of two tokens"
        ),
        pytest.param(("1,4", "1,4"), "y = Neg(x)", False, id="nothing selects"),
    ],
)
def test_rows_are_selected(shapes: tuple[str, str], body: str, selects: bool) -> None:
    given, result = shapes
    source = graph(f"g (float[{given}] x) => (float[{result}] y) <int64[1] k = {{2}}> {{ {body} }}")
    assert (1 in selected_axes(source)) is selects


@pytest.mark.parametrize(
    ("result", "body", "axes"),
    [
        pytest.param("50,6", "v, i = TopK<axis = 0>(x, k) y = Neg(v)", (0,), id="a table without a batch"),
        pytest.param("50", "v, i = TopK<axis = 0>(x, k) y = ReduceSum<keepdims = 0>(v)", (0,), id="a vector"),
        pytest.param("N,6", "v, i = TopK<axis = 0>(x, k) y = Neg(v)", (0,), id="an unknown number"),
        pytest.param("400,6", "v, i = TopK<axis = 0>(x, k) y = Neg(x)", (), id="all rows of the input"),
        pytest.param("50,50", "v, i = TopK<axis = 0>(x, k) y = Neg(v)", (0, 1), id="either axis"),
    ],
)
def test_rows_without_a_batch_are_selected(result: str, body: str, axes: tuple[int, ...]) -> None:
    source = graph(f"g (float[400,6] x) => (float[{result}] y) <int64[1] k = {{50}}> {{ {body} }}")
    assert selected_axes(source) == axes


def test_states_that_become_outputs_have_types_and_other_models_are_not_copied() -> None:
    weights = "float[1,2,1] w = {0.5, 0.5}, float[1,2,2] r = {0.5, 0.0, 0.0, 0.5}"
    text = f"g (float[T,1,1] x) => (float[T,1,1,2] y) <{weights}> {{ y = RNN<hidden_size = 2>(x, w, r) }}"
    source = graph(text)
    source.facts()
    assert "y/state1" in with_states(source).facts().main and with_states(FLOAT) is FLOAT
