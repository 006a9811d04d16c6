"""The results that everything is compared with: those of exact arithmetic, and as the model's types round."""

import numpy as np
from graphs import graph
from tables import values

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


@values
def test_rows_are_selected(shapes: tuple[str, str], body: str, selects: bool) -> None:
    given, result = shapes
    source = graph(f"g (float[{given}] x) => (float[{result}] y) <int64[1] k = {{2}}> {{ {body} }}")
    assert (1 in selected_axes(source)) is selects


@values
def test_rows_without_a_batch_are_selected(result: str, body: str, axes: tuple[int, ...]) -> None:
    source = graph(f"g (float[400,6] x) => (float[{result}] y) <int64[1] k = {{50}}> {{ {body} }}")
    assert selected_axes(source) == axes


def test_states_that_become_outputs_have_types_and_other_models_are_not_copied() -> None:
    weights = "float[1,2,1] w = {0.5, 0.5}, float[1,2,2] r = {0.5, 0.0, 0.0, 0.5}"
    text = f"g (float[T,1,1] x) => (float[T,1,1,2] y) <{weights}> {{ y = RNN<hidden_size = 2>(x, w, r) }}"
    source = graph(text)
    source.facts()
    assert "y/state1" in with_states(source).facts().main and with_states(FLOAT) is FLOAT
