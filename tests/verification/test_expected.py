"""The results that everything is compared with: those of exact arithmetic, and as the model's types round."""

import numpy as np
import pytest
from graphs import graph
from tables import values

from rewriter.base.errors import ModelError
from rewriter.ir.model import Array
from rewriter.verification.expected import expected_outputs, selected_axes, with_states
from rewriter.verification.not_finite import first_nan, nan_outputs, nan_warnings

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
    assert (1 in selected_axes(source).get("y", ())) is selects


@values
def test_rows_without_a_batch_are_selected(result: str, body: str, axes: tuple[int, ...]) -> None:
    source = graph(f"g (float[400,6] x) => (float[{result}] y) <int64[1] k = {{50}}> {{ {body} }}")
    assert selected_axes(source).get("y", ()) == axes


def test_rows_of_an_output_beside_a_selection_are_in_order() -> None:
    inside = "p = If <then_branch = t () => (float[1,2,4] a) { a, at = TopK<axis = 1>(x, k) }, "
    inside += "else_branch = e () => (float[1,2,4] b) { b, bt = TopK<axis = 1>(x, k) }> (c)"
    for body in ("p, i = TopK<axis = 1>(x, k)", inside):
        source = graph(f"""
            g (float[1,9,4] x, bool c) => (float[1,9,4] raw, float[1,2,4] best) <int64[1] k = {{2}}> {{
                raw = Neg(x) {body} best = Exp(p) }}""")
        assert selected_axes(source) == {"best": (1,)}


def test_states_that_become_outputs_have_types_and_other_models_are_not_copied() -> None:
    weights = "float[1,2,1] w = {0.5, 0.5}, float[1,2,2] r = {0.5, 0.0, 0.0, 0.5}"
    text = f"g (float[T,1,1] x) => (float[T,1,1,2] y) <{weights}> {{ y = RNN<hidden_size = 2>(x, w, r) }}"
    source = graph(text)
    source.facts()
    assert "y/state1" in with_states(source).facts().main and with_states(FLOAT) is FLOAT


NAN, INF = np.nan, np.inf


@values
def test_the_share_of_an_output(values: list[float], share: float | None) -> None:
    found = nan_outputs([{"y": np.array(values, np.float32)}])
    assert found == ({} if share is None else {"y": share})


def test_the_worst_sample_counts_for_each_output() -> None:
    def sample(nans: int) -> dict[str, Array]:
        return {"good": np.ones(4), "bad": np.array([NAN] * nans + [1.0] * (4 - nans))}

    assert nan_outputs([sample(1), sample(2), sample(0)]) == {"bad": 0.5}


@values
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
