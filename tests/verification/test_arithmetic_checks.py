"""The reasons that a failed check gives."""

import time

import numpy as np
import pytest
from graphs import apply, graph, with_weights
from onnx import numpy_helper
from tables import values

from rewriter.ir.model import Array, Model, load
from rewriter.ir.plan import Plan
from rewriter.passes.base import Context
from rewriter.passes.mixed_precision import MixedPrecision
from rewriter.passes.unfold_patches import UnfoldPatches
from rewriter.report.remarks import worded
from rewriter.runtime.metrics.tolerances import Tolerance
from rewriter.verification.arithmetic_checks import check_emulation, check_structure
from rewriter.verification.compare_runs import Standard
from rewriter.verification.expected import Expected, expected_outputs

DOUBLED = graph("g (float[4] x) => (float[4] y) { y = Add(x, x) }")


def outputs(*values: float) -> list[dict[str, Array]]:
    return [{"y": np.full(4, value, np.float32)} for value in values]


def sample(value: float, size: int = 4) -> dict[str, Array]:
    return {"x": np.full(size, value, np.float32)}


@values
def test_a_failure_names_an_output_without_values(size: float, fed: float, words: str | None) -> None:
    expected = Expected(outputs(size), outputs(size))
    check = check_structure(expected, DOUBLED, [], [sample(fed)])
    assert check.passed is (words is None)
    assert len(check.details) == bool(words)
    assert "".join(check.details).startswith(words or "")
    assert not words or "is the data what the model expects" in check.details[0]


DEPTH = 16 * 16 * 3  # number of products in each sum below


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
    feeds = {"x": rng.standard_normal((1, 3, 64, 64)).astype(np.float16)}
    return with_weights(text, {"w": weight, "b": bias}), feeds


def test_sums_in_another_order_may_differ_by_one_rounding_in_a_model_that_rounds() -> None:
    model, feeds = _half()
    expected = expected_outputs(model, [feeds])
    for rounded, value in ((True, expected.as_written[0]["y"]), (False, expected.exact[0]["y"])):
        assert np.array_equal(value, value.astype(np.float16)) is rounded
    unfolded, report = apply(UnfoldPatches(), model)
    assert report.changes
    check = check_structure(expected, unfolded, [UnfoldPatches()], [feeds])
    assert check.passed, worded(check).summary
    assert "for the model's own rounding" in worded(check).summary
    bit_equal = check_structure(expected, unfolded, [], [feeds])
    assert bit_equal.passed is False
    wrong = model.whole()
    weight = numpy_helper.to_array(wrong.graph.initializer[0]) * np.float16(1.01)
    wrong.graph.initializer[0].CopyFrom(numpy_helper.from_array(weight, "w"))
    assert check_structure(expected, load(wrong), [UnfoldPatches()], [feeds]).passed is False


def test_the_summary_names_the_limit_of_the_output_closest_to_its_limit() -> None:
    """Rounding s swaps half of y's values; values matched as sets have twice the allowance."""
    source = graph("""
        g (float[64] x) => (float[1,16,1] y, float[64] z)
        <int64[1] k = {16}, int64[2] axes = {0, 2}, float c = {1000.0}> {
            shifted = Add(x, c) s = Sub(shifted, c) best, places = TopK(s, k)
            rows = Gather(x, places) y = Unsqueeze(rows, axes) z = Identity(x) }""")
    low = apply(MixedPrecision(), source, Context(plan=Plan("fp16")))[0]
    feeds = {"x": np.random.default_rng(0).standard_normal(64).astype(np.float32)}
    check = check_emulation(expected_outputs(source, [feeds]), low, "fp16", [feeds])
    limits = {output.name: output.tolerance for output in check.outputs}
    assert limits["y"] == 2 * limits["z"]
    nearest = max(check.outputs, key=lambda output: output.relative_l2 / output.tolerance)
    assert nearest.name == "y"
    assert f" in y, NOT within {limits['y']:.2g}; its rows are" in worded(check).summary


def test_arithmetic_is_compared_with_exact_results_and_structure_with_rounded_ones() -> None:
    right, wrong = outputs(2.0), outputs(6.0)
    for exact, as_written in ((right, wrong), (wrong, right)):
        expected = Expected(exact, as_written)
        for precision in ("fp16", "fp32"):
            check = check_emulation(expected, DOUBLED, precision, [sample(1.0)])
            assert check.passed is (exact is right)
        assert check_structure(expected, DOUBLED, [], [sample(1.0)]).passed is (as_written is right)


@pytest.mark.parametrize(
    ("written", "allowed"), [(6.0, True), (np.inf, False)], ids=["relative to the exact result", "not finite"]
)
def test_what_the_own_rounding_of_a_model_allows(written: float, allowed: bool) -> None:
    expected = Expected(outputs(2.0), outputs(written))
    check = check_structure(expected, DOUBLED, [UnfoldPatches()], [sample(written / 2)])
    assert check.passed and ("and 4 for the model's own rounding" in worded(check).summary) is allowed
    assert ("own rounding" in worded(check).summary) is allowed


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 5e-3), ("fp16", 5e-3), ("bf16", 4e-2)])
def test_the_tolerance_is_that_of_the_precision(precision: str, tolerance: float) -> None:
    """Products in FP32 are emulated in TF32, and have its tolerance."""
    check = check_emulation(Expected(outputs(2.0), outputs(2.0)), DOUBLED, precision, [sample(1.0)])
    assert [output.tolerance for output in check.outputs] == [tolerance]
    name = "TF32" if precision == "fp32" else precision.upper()
    assert worded(check).summary == f"{name} emulated: largest error 0 in y, within {tolerance}"


@pytest.mark.parametrize(("tolerance", "met"), [(12.0, True), (13.0, False)])
def test_a_metric_of_the_users_judges_all_outputs_together(tolerance: float, met: bool) -> None:
    """A peak of 1 and errors of 0.25 are 12.04 dB."""
    expected = [{"y": np.array([2.0, 3.0, 2.0, 3.0], np.float32)}]
    feeds = {"x": np.array([1.125, 1.625, 1.125, 1.625], np.float32)}
    held = Standard(Tolerance(tolerance, "psnr", "--tolerance"))
    check = check_emulation(Expected(expected, expected), DOUBLED, "fp16", [feeds], standard=held)
    assert (check.passed, check.value and check.value.met) == (met, met)
    relation = "within" if met else "NOT within"
    assert worded(check).summary == f"FP16 emulated: psnr 12, {relation} {tolerance:.3g}"
    assert [output.note for output in check.outputs] == ["judged by psnr"]


def test_a_check_knows_how_long_it_took() -> None:
    for size, passed in ((4, True), (5, None)):
        start = time.perf_counter()
        check = check_structure(Expected(outputs(2.0), outputs(2.0)), DOUBLED, [], [sample(1.0, size)])
        assert check.passed is passed
        assert 0.0 < check.seconds <= time.perf_counter() - start


def test_a_structure_check_adds_up_what_its_passes_allow() -> None:
    expected, one = Expected(outputs(2.0), outputs(2.0)), UnfoldPatches()
    check = check_structure(expected, DOUBLED, [one, one], [sample(1.0)])
    allowed = 2 * one.exactness.tolerance
    assert [output.tolerance for output in check.outputs] == [allowed]
    assert worded(check).summary == f"FP32 result is within {allowed:.2g} (unfold-patches, unfold-patches)"
    exact = check_structure(expected, DOUBLED, [], [sample(1.0)])
    assert worded(exact).summary == "FP32 result is bit-equal"
