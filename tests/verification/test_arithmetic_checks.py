"""The reasons that a failed check gives."""

from __future__ import annotations

import time

import numpy as np
import pytest
from graphs import apply, graph, with_weights
from onnx import numpy_helper

from rewriter.ir.base import Context
from rewriter.ir.model import Array, Model, load
from rewriter.ir.plan import Plan
from rewriter.judge.arithmetic_checks import check_emulation, check_structure
from rewriter.judge.expected import Expected, expected_outputs
from rewriter.judge.judge import Standard
from rewriter.passes.mixed_precision import MixedPrecision
from rewriter.passes.unfold_patches import UnfoldPatches
from rewriter.runtime.figures.tolerances import Tolerance

DOUBLED = "g (float[4] x) => (float[4] y) { y = Add(x, x) }"


@pytest.mark.parametrize(
    ("size", "words"),
    [
        pytest.param(0.0, "output y: the original gives 0 throughout", id="zeros"),
        pytest.param(1e-40, "output y: the original gives no value above 1e-40", id="too small for FP32"),
        pytest.param(1.0, "", id="meaningful values"),
    ],
)
def test_a_failure_names_an_output_without_values_as_the_reason(size: float, words: str) -> None:
    outputs = [{"y": np.full(4, size, np.float32)}]
    sample = {"x": np.full(4, size or 1.0, np.float32)}
    check = check_structure(Expected(outputs, outputs), graph(DOUBLED), [], [sample])
    assert check.passed is False
    assert len(check.details) == bool(words)
    assert "".join(check.details).startswith(words)
    assert not words or "is the data what the model expects" in check.details[0]


def test_a_check_that_passes_has_no_details() -> None:
    zeros = [{"y": np.zeros(4, np.float32)}]
    sample = {"x": np.zeros(4, np.float32)}
    check = check_structure(Expected(zeros, zeros), graph(DOUBLED), [], [sample])
    assert (check.passed, check.details) == (True, ())


DEPTH = 16 * 16 * 3
"""Number of products in each sum below."""


def _half() -> tuple[Model, dict[str, Array]]:
    """A patch embedding in FP16 with random weights, and a sample for it.

    As a product and an Add it rounds twice where the Conv rounds once.
    """
    rng = np.random.default_rng(0)
    text = (
        "g (float16[1,3,64,64] x, float16[32,3,16,16] w, float16[32] b) => (float16[1,32,4,4] y) "
        "{ y = Conv<strides = [16, 16]>(x, w, b) }"
    )
    weight = (rng.standard_normal((32, 3, 16, 16)) / np.sqrt(DEPTH)).astype(np.float16)
    bias = rng.standard_normal(32).astype(np.float16)
    return with_weights(text, {"w": weight, "b": bias}), {
        "x": rng.standard_normal((1, 3, 64, 64)).astype(np.float16)
    }


def test_sums_in_another_order_may_differ_by_one_rounding_in_a_model_that_rounds() -> None:
    model, sample = _half()
    unfolded, report = apply(UnfoldPatches(), model)
    assert report.changes
    check = check_structure(expected_outputs(model, [sample]), unfolded, [UnfoldPatches()], [sample])
    assert check.passed, check.summary
    assert "for the model's own rounding" in check.summary


def test_a_wrong_rewrite_of_a_model_that_rounds_still_fails() -> None:
    model, sample = _half()
    wrong = model.whole()
    weight = numpy_helper.to_array(wrong.graph.initializer[0]) * np.float16(1.01)
    wrong.graph.initializer[0].CopyFrom(numpy_helper.from_array(weight, "w"))
    check = check_structure(expected_outputs(model, [sample]), load(wrong), [UnfoldPatches()], [sample])
    assert check.passed is False


def test_bit_equal_passes_must_be_bit_equal_in_a_model_that_rounds() -> None:
    model, sample = _half()
    unfolded, _ = apply(UnfoldPatches(), model)
    check = check_structure(expected_outputs(model, [sample]), unfolded, [], [sample])
    assert check.passed is False


def test_the_summary_names_the_limit_of_the_output_closest_to_its_limit() -> None:
    """Rounding s swaps half of y's values; values matched as sets have twice the allowance."""
    source = graph("""
        g (float[64] x) => (float[1,16,1] y, float[64] z)
        <int64[1] k = {16}, int64[2] axes = {0, 2}, float c = {1000.0}> {
            shifted = Add(x, c)
            s = Sub(shifted, c)
            best, places = TopK(s, k)
            rows = Gather(x, places)
            y = Unsqueeze(rows, axes)
            z = Identity(x)
        }""")
    low = apply(MixedPrecision(), source, Context(plan=Plan("fp16")))[0]
    feeds = {"x": np.random.default_rng(0).standard_normal(64).astype(np.float32)}
    check = check_emulation(expected_outputs(source, [feeds]), low, "fp16", [feeds])
    limits = {output.name: output.tolerance for output in check.outputs}
    assert limits["y"] == 2 * limits["z"]
    nearest = max(check.outputs, key=lambda output: output.relative_l2 / output.tolerance)
    assert nearest.name == "y"
    assert check.summary.endswith(f"within {limits['y']:.2g}")


def test_arithmetic_is_compared_with_exact_results_and_structure_with_rounded_ones() -> None:
    sample = {"x": np.ones(4, np.float32)}
    right, wrong = [{"y": np.full(4, 2.0, np.float32)}], [{"y": np.full(4, 6.0, np.float32)}]
    for exact, as_written in ((right, wrong), (wrong, right)):
        expected, doubled = Expected(exact, as_written), graph(DOUBLED)
        assert check_emulation(expected, doubled, "fp16", [sample]).passed is (exact is right)
        assert check_emulation(expected, doubled, "fp32", [sample]).passed is (exact is right)
        assert check_structure(expected, doubled, [], [sample]).passed is (as_written is right)


def test_the_rounding_allowance_is_relative_to_the_exact_result() -> None:
    exact, as_written = [{"y": np.full(4, 2.0, np.float32)}], [{"y": np.full(4, 6.0, np.float32)}]
    sample = {"x": np.full(4, 3.0, np.float32)}
    check = check_structure(Expected(exact, as_written), graph(DOUBLED), [UnfoldPatches()], [sample])
    assert "and 4 for the model's own rounding" in check.summary


def test_rounding_that_leaves_nothing_finite_allows_nothing() -> None:
    exact, as_written = [{"y": np.full(4, 2.0, np.float32)}], [{"y": np.full(4, np.inf, np.float32)}]
    sample = {"x": np.full(4, np.inf, np.float32)}
    check = check_structure(Expected(exact, as_written), graph(DOUBLED), [UnfoldPatches()], [sample])
    assert check.passed and "own rounding" not in check.summary


def test_an_error_is_relative_to_the_expected_value() -> None:
    sample = {"x": np.ones(4, np.float32)}
    expected = [{"y": np.full(4, 8.0, np.float32)}]
    check = check_structure(Expected(expected, expected), graph(DOUBLED), [], [sample])
    assert [output.relative_l2 for output in check.outputs] == [0.75]


def test_the_written_outputs_are_rounded_and_the_exact_ones_are_not() -> None:
    model, sample = _half()
    expected = expected_outputs(model, [sample])
    for outputs, rounded in ((expected.as_written, True), (expected.exact, False)):
        value = outputs[0]["y"]
        assert np.array_equal(value, value.astype(np.float16)) is rounded


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 5e-3), ("fp16", 5e-3), ("bf16", 4e-2)])
def test_the_tolerance_is_that_of_the_precision(precision: str, tolerance: float) -> None:
    """Products in FP32 are emulated in TF32, and have its tolerance."""
    expected, sample = [{"y": np.full(4, 2.0, np.float32)}], {"x": np.ones(4, np.float32)}
    check = check_emulation(Expected(expected, expected), graph(DOUBLED), precision, [sample])
    assert [output.tolerance for output in check.outputs] == [tolerance]
    name = "TF32" if precision == "fp32" else precision.upper()
    assert check.summary == f"{name} emulated: largest error 0, within {tolerance}"


@pytest.mark.parametrize(
    ("value", "tolerance", "words"),
    [
        pytest.param(1.5, 0.5, "largest error 0.25, within 0.5", id="below it"),
        pytest.param(1.5, 0.25, "largest error 0.25, within 0.25", id="just within"),
        pytest.param(1.5, 0.125, "largest error 0.25, NOT within 0.12", id="beyond it"),
    ],
)
def test_the_summary_has_the_largest_error(value: float, tolerance: float, words: str) -> None:
    expected, sample = [{"y": np.full(4, 2.0, np.float32)}], {"x": np.full(4, value / 2, np.float32)}
    held = Standard(Tolerance(tolerance, "relative-l2", "--tolerance"))
    check = check_emulation(Expected(expected, expected), graph(DOUBLED), "fp16", [sample], standard=held)
    assert check.summary == f"FP16 emulated: {words}"
    assert check.passed is ("NOT" not in words)


@pytest.mark.parametrize(("tolerance", "met"), [(12.0, True), (13.0, False)])
def test_a_metric_of_the_users_judges_all_outputs_together(tolerance: float, met: bool) -> None:
    """A peak of 1 and errors of 0.25 are 12.04 dB."""
    expected = [{"y": np.array([2.0, 3.0, 2.0, 3.0], np.float32)}]
    sample = {"x": np.array([1.125, 1.625, 1.125, 1.625], np.float32)}
    held = Standard(Tolerance(tolerance, "psnr", "--tolerance"))
    check = check_emulation(Expected(expected, expected), graph(DOUBLED), "fp16", [sample], standard=held)
    assert (check.passed, check.value and check.value.met) == (met, met)
    relation = "within" if met else "NOT within"
    assert check.summary == f"FP16 emulated: psnr 12, {relation} {tolerance:.3g}"
    assert [output.note for output in check.outputs] == ["judged by psnr"]


def test_a_check_knows_how_long_it_took() -> None:
    expected, sample = [{"y": np.full(4, 2.0, np.float32)}], {"x": np.ones(4, np.float32)}
    wrong = {"x": np.ones(5, np.float32)}
    for given, passed in ((sample, True), (wrong, None)):
        start = time.perf_counter()
        check = check_structure(Expected(expected, expected), graph(DOUBLED), [], [given])
        assert check.passed is passed
        assert 0.0 < check.seconds <= time.perf_counter() - start


def test_a_structure_check_adds_up_what_its_passes_allow() -> None:
    expected, sample = [{"y": np.full(4, 2.0, np.float32)}], {"x": np.ones(4, np.float32)}
    one = UnfoldPatches()
    check = check_structure(Expected(expected, expected), graph(DOUBLED), [one, one], [sample])
    assert [output.tolerance for output in check.outputs] == [2 * one.exactness.tolerance]
    assert check.summary == (
        f"FP32 result is within {2 * one.exactness.tolerance:.2g} (unfold-patches, unfold-patches)"
    )
    exact = check_structure(Expected(expected, expected), graph(DOUBLED), [], [sample])
    assert exact.summary == "FP32 result is bit-equal"
