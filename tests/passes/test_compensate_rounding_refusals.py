"""compensate-rounding: weights that are rounded to nearest, and the reported reasons."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from graphs import apply, graph
from weighted import MATMUL, Feeds, compensated, on_grid, related, weighted, weights

from rewriter.model import Array, Model
from rewriter.model.facts import infer
from rewriter.passes.compensate_rounding import CompensateRounding
from rewriter.plan import Decision, Plan
from rewriter.planning.planner import SEARCHED

FP16 = 10


def test_nodes_that_the_plan_keeps_are_skipped() -> None:
    source = weighted(MATMUL, w=(48, 24))
    kept = Plan("fp16", decisions=(Decision("m", "MatMul", "0:y", "user", "because"),))
    result, report = compensated(source, {"x": related(1, 96, 48)}, plan=kept)
    assert result is source
    assert not report.refusals


def test_nodes_that_a_search_put_in_fp32_are_rounded() -> None:
    """Such products are TF32: a plan that is saved and applied again gives the weights that were judged."""
    source, feeds = weighted(MATMUL, w=(48, 24)), {"x": related(1, 96, 48)}
    found = Plan("fp16", decisions=(Decision("m", "MatMul", "0:y", SEARCHED, "because"),))
    apart, together = (compensated(source, feeds, plan=plan)[0] for plan in (found, Plan("fp16")))
    assert on_grid(weights(apart)["w"])
    np.testing.assert_array_equal(weights(apart)["w"], weights(together)["w"])


def _with(source: Model, change: Callable[[Array], None]) -> Model:
    stored = source.proto.graph.initializer[0]
    value = source.array(stored).copy()
    change(value)
    stored.CopyFrom(source.detached_tensor(stored.name, value))
    return source


def _put(index: tuple[int, ...], number: float) -> Callable[[Array], None]:
    def change(value: Array) -> None:
        value[index] = number

    return change


X = related(1, 96, 48)
BRANCH = """g (float[1,96,48] x, bool c) => (float[1,96,24] y) {
    y = If (c) <then_branch = t () => (float[1,96,24] u) { u = MatMul(x, w) },
                else_branch = e () => (float[1,96,24] v) { v = MatMul(x, w) }> }"""


@pytest.mark.parametrize(
    ("source", "feeds", "reason"),
    [
        pytest.param(
            _with(weighted(MATMUL, w=(48, 24)), _put((0, 0), 1e5)),
            {"x": X},
            "cannot hold 1e+05",
            id="out of range",
        ),
        pytest.param(
            _with(weighted(MATMUL, w=(48, 24)), _put((0, 0), np.nan)),
            {"x": X},
            "not finite",
            id="NaN in a weight",
        ),
        pytest.param(weighted(MATMUL, w=(48, 24)), {"x": 0 * X}, "is zero", id="activations of zeros"),
        pytest.param(
            weighted(MATMUL, w=(48, 24)), {"x": X * np.float32(np.nan)}, "not finite", id="NaN in activations"
        ),
        pytest.param(
            weighted(
                "g (float[1,96,48] x) => (float[1,96,24] y, float[48,24] v)"
                " { y = MatMul(x, w)  v = Relu(w) }",
                w=(48, 24),
            ),
            {"x": X},
            "in different layouts",
            id="read in another way",
        ),
        pytest.param(
            weighted("g (float[2,96,48] x) => (float[2,96,24] y) { y = MatMul(x, w) }", w=(2, 48, 24)),
            {"x": np.concatenate([X, X])},
            "3 axes",
            id="batched weight",
        ),
        pytest.param(weighted(MATMUL, w=(48, 24)), {"x": X[:, :1]}, "too few rows", id="one row"),
    ],
)
def test_refusals_and_their_reasons(source: Model, feeds: Feeds, reason: str) -> None:
    if feeds["x"].shape[1] == 1:
        source = weighted("g (float[1,1,48] x) => (float[1,1,24] y) { y = MatMul(x, w) }", w=(48, 24))
    result, report = compensated(source, feeds)
    assert result is source
    assert [refusal for refusal in report.refusals if reason in refusal.reason]


def test_each_reason_is_given_once_with_the_number_of_its_nodes() -> None:
    text = "g (float[1,96,48] x) => (float[1,96,24] a, float[1,96,24] b, float[1,96,24] c)"
    source = weighted(
        f"{text} {{ a = MatMul(x, u) b = MatMul(x, v) c = MatMul(x, w) }}", u=(48, 24), v=(48, 24), w=(48, 24)
    )
    for stored, number in zip(source.proto.graph.initializer, (1e5, np.nan, 1e5), strict=True):
        value = source.array(stored).copy()
        value[0, 0] = number
        stored.CopyFrom(source.detached_tensor(stored.name, value))
    _, report = compensated(source, {"x": X})
    assert [(one.node, one.reason) for one in report.refusals] == [
        ("MatMul(a)", "FP16 cannot hold 1e+05 (and 1 more)"),
        ("MatMul(b)", "the weight is not finite"),
    ]


def test_weights_in_branches_are_left() -> None:
    source = weighted(BRANCH, w=(48, 24))
    result, _ = compensated(source, {"x": X, "c": np.array(True)})
    assert result is source


def test_unrelated_activations_gain_nothing_and_lose_nothing() -> None:
    """With no more rows than channels all is noise: the judgement on rows held out speaks against it."""
    source = weighted("g (float[4,64] x) => (float[4,8] y) { y = MatMul(x, w) }", w=(64, 8))
    rng = np.random.default_rng(0)
    feeds = [
        {"x": (rng.standard_normal((4, 64)) * (np.arange(64) % 4 == s)).astype(np.float32)} for s in range(3)
    ]
    result, report = compensated(source, *feeds)
    assert result is source
    assert "held out" in report.refusals[0].reason


@pytest.mark.parametrize(("real", "told"), [(True, None), (False, "the data is random")])
def test_random_data_counts_as_none(real: bool, told: str | None) -> None:
    source = weighted(MATMUL, w=(48, 24))
    result, report = compensated(source, {"x": X}, real=real)
    assert (result is source) == (not real)
    assert [r.reason.split(":")[0] for r in report.refusals] == ([told] if told else [])


def test_a_model_in_fp16_has_nothing_to_round() -> None:
    source = graph(
        "g (float16[4,2] x) => (float16[4,2] y) <float16[2,2] w = {1, 2, 3, 4}> { y = MatMul(x, w) }"
    )
    result, report = apply(CompensateRounding(), source)
    assert result is source
    assert not report.refusals
    assert infer(source).main["y"].dtype == FP16
