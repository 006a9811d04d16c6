"""What may excuse a failed check: the network's own sums, or its own FP32 engine, within limits."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from graphs import graph
from tables import values

import rewriter
from rewriter.report.remarks import error as error_words
from rewriter.report.remarks import worded
from rewriter.runtime.metrics.outputs import OutputComparison, worst_of_samples
from rewriter.runtime.metrics.probabilities import ProbabilityError
from rewriter.runtime.metrics.tolerances import TOLERANCES
from rewriter.verification.arithmetic_checks import (
    as_fp32,
    beyond_tf32,
    check_emulation,
    conditioning,
    errs_by_chance,
    excused,
    limited_by_tf32,
    without_tf32,
)
from rewriter.verification.compare_runs import Standard
from rewriter.verification.expected import Expected, expected_outputs
from rewriter.verification.verdict import Check, MetricValue, gap_kinds, remark


def output(name: str, error: float, tolerance: float = 5e-3) -> OutputComparison:
    return OutputComparison(name, error, 1.0, 0.9, math.isfinite(error), tolerance)


def failed(*outputs: OutputComparison) -> Check:
    return samples(outputs)


def samples(*rounds: tuple[OutputComparison, ...]) -> Check:
    return Check("emulation", False, (), worst_of_samples(rounds), rounds=rounds)


def judged(error: float) -> Check:
    return replace(failed(output("y", error)), passed=error < 5e-3)


def errors(**of_outputs: float) -> Callable[[], Mapping[str, float]]:
    return lambda: of_outputs


def engine(*errors: float) -> Callable[[], list[list[OutputComparison]]]:
    """An FP32 engine that errs so much, sample by sample."""
    return lambda: [[output("y", error)] for error in errors]


def never() -> Any:
    raise AssertionError("it was asked for a check that did not fail")


@pytest.mark.parametrize("passed", [True, None], ids=["passed", "not made"])
def test_a_check_that_did_not_fail_is_not_judged_again(passed: bool | None) -> None:
    check = Check("emulation", passed, (), (output("y", 1e-3),))
    assert excused(check, never) is check
    assert as_fp32(check, never) is check


@values
def test_another_order_of_sums_excuses_twice_its_error(error: float, own: float, passed: bool) -> None:
    found = excused(failed(output("y", error)), errors(y=own))
    assert found.passed is passed
    assert found.excuse == ("conditioning" if passed else "")
    assert found.outputs[0].tolerance == pytest.approx(min(0.1, 2 * own)), "shown as what was allowed"


QUANTISED = """
    g (float[64,64] x) => (float[64,64] y)
    <float k = {0.37}, float step = {0.02}, int8 zero = {0}, float wrong = {1.1}> {
        [scaled] a = Mul(x, k) q = QuantizeLinear(a, step, zero) d = DequantizeLinear(q, step, zero)
        y = TAIL }"""


@pytest.mark.parametrize(("tail", "passed"), [("Tanh(d)", True), ("Mul(d, wrong)", False)])
def test_values_that_fall_into_another_bucket_are_excused(tail: str, passed: bool) -> None:
    """FP16 moves a few of 4,096 by a whole step; a factor of 1.1 is no rounding."""
    original = graph(QUANTISED.replace("TAIL", "Tanh(d)"))
    feeds = [{"x": np.random.default_rng(0).normal(0.0, 0.2, (64, 64)).astype(np.float32)}]
    expected = expected_outputs(original, feeds)
    own = conditioning(original, feeds, expected)
    assert own["y"] > 5e-3, "another order of sums alone moves nothing here"
    low = "h = Cast <to = 10> (x) g = Cast <to = 10> (k) m = Mul(h, g) a = Cast <to = 1> (m)"
    fixed = graph(QUANTISED.replace("TAIL", tail).replace("[scaled] a = Mul(x, k)", low))
    check = check_emulation(expected, fixed, "fp16", feeds)
    assert check.passed is False and excused(check, lambda: own).passed is passed


@pytest.mark.parametrize(("error", "passed"), [(0.0141, True), (0.0142, False)])
def test_an_fp32_engine_excuses_half_a_bit_more(error: float, passed: bool) -> None:
    check = failed(output("y", error))
    found = as_fp32(check, engine(0.01))
    if passed:
        assert (found.passed, found.excuse) == (True, "as-fp32")
        why = "the network's own FP32 engine (TF32) has an error of 0.01"
        assert error_words(found) == f"largest error 0.014 in y, within 0.014; {why}"
    else:
        assert found is check, "the engine's error explains nothing: it is not mentioned"


@values
def test_fp32_excuses_its_own_sample(result: tuple[float, ...], own: tuple[float, ...], passed: bool) -> None:
    found = as_fp32(samples(*((output("y", error),) for error in result)), engine(*own))
    assert found.passed is passed and found.outputs[0].relative_l2 == max(result)


def test_on_which_sample_a_file_that_is_all_fp32_errs_is_chance() -> None:
    check = samples((output("y", 0.004),), (output("y", 0.0119),))
    assert as_fp32(check, engine(0.01, 0.001), by_chance=True).passed
    assert not as_fp32(check, engine(0.01, 0.001)).passed
    assert not as_fp32(check, engine(0.008, 0.001), by_chance=True).passed


@values
def test_chance_decides_where_a_file_errs_in_fp32_or_in_rows(body: str, kind: str, chance: bool) -> None:
    size = {"x": 4, "k": 2}[kind]
    model = graph(f"g (float[1,4] x) => (float[1,{size}] y) <int64[1] k = {{2}}> {{ {body} }}")
    assert errs_by_chance(model) is chance


ROWS = """g (float[1,T,8] x, float[1,T,2] k) => (float[1,T,2] y)
    <float[8,2] w = {2049.0, 0.0, -2048.0, 0.5, 2.0, 1.0, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0}> {
        l = MatMul(x, w) BODY y = Softmax(s) }"""
EXACT, IN_FP16 = (
    "a = Add(l, k) s = Sub(a, k)",
    "h = Cast<to = 10>(l) c = Cast<to = 10>(k) a = Add(h, c) b = Sub(a, c) s = Cast<to = 1>(b)",
)


@values
def test_single_rows_may_move_where_fp32_moves_single_rows(rows: int, hard: bool, passed: bool) -> None:
    """TF32 rounds 2049, FP16 rounds 4098: each moves a row from 0.73 to 0.27, on a sample of its own."""
    original, fixed = (graph(ROWS.replace("T", str(rows)).replace("BODY", b)) for b in (EXACT, IN_FP16))
    x, k = np.zeros((1, rows, 8), np.float32), np.zeros((1, rows, 2), np.float32)
    x[..., 3] = 2.0
    by_tf32, by_fp16 = x.copy(), x.copy()
    by_tf32[0, 0, :4], by_fp16[0, 0, :4] = (2, 2, 0, 0), (0, 0, 1, 0)
    offset = k.copy()
    offset[0, 0, 0] = 4096.0
    data = [{"x": by_fp16, "k": offset}, *([{"x": by_tf32, "k": k}] if hard else [])]
    expected = expected_outputs(original, data)
    held = Standard.of(original, TOLERANCES["fp16"])
    check = check_emulation(expected, fixed, "fp16", data, "fp16", held)
    assert check.passed is False and check.outputs[0].max_abs == pytest.approx(0.46, abs=0.01)
    own = check_emulation(expected, original, "fp32", data, "fp32", held)
    found = as_fp32(check, lambda: own.rounds)
    assert (found.passed, found.excuse) == ((True, "as-fp32") if passed else (False, ""))


def test_every_output_needs_an_excuse_of_its_own() -> None:
    check = failed(output("y", 0.015), output("z", 0.02))
    assert excused(check, errors(y=0.01, z=0.01)).passed
    assert not excused(check, errors(y=0.01)).passed
    assert not excused(check, errors(y=0.01, z=0.009)).passed
    assert excused(failed(output("y", 0.015), output("z", 4e-3)), errors(y=0.01)).passed


def test_a_smaller_error_never_lowers_a_tolerance() -> None:
    check = failed(output("y", 0.015))
    assert excused(check, errors(y=1e-4)) is check and excused(check, errors()) is check
    both = excused(failed(output("y", 0.015), output("z", 4e-3)), errors(y=0.01, z=1e-4))
    assert [one.tolerance for one in both.outputs] == [0.02, 5e-3]


def test_a_metric_of_the_users_is_not_excused() -> None:
    check = replace(failed(output("y", 0.015)), value=MetricValue("psnr", 30.0, 40.0, False))
    assert excused(check, errors(y=0.01)) is check


DOUBLED = graph("g (float[4] x) => (float[4] y) { y = Add(x, x) }")


@pytest.mark.parametrize(("value", "hint"), [(2.0, False), (8.0, True)])
def test_a_failed_tf32_check_says_how_to_avoid_tf32(value: float, hint: bool) -> None:
    expected = [{"y": np.full(4, value, np.float32)}]
    sample = {"x": np.ones(4, np.float32)}
    check = check_emulation(Expected(expected, expected), DOUBLED, "fp32", [sample], "fp16")
    assert (check.name, check.passed) == ("tf32", not hint)
    assert ("--noTF32" in worded(check).summary) is hint


@values
def test_a_file_with_tf32_off(error: float, exact: float | None, off: float | None, words: str) -> None:
    def tried() -> Check:
        assert exact is not None
        return judged(exact)

    found = without_tf32(judged(error), tried)
    assert found.tf32_off == (None if off is None else pytest.approx(off))
    assert words in worded(replace(found, remarks=remark("no-gpu"))).summary
    assert found.passed is (error < 5e-3), "a recommendation is no excuse"


@values
def test_an_error_that_tf32_cannot_explain_needs_no_run_without_it(
    error: float, tf32: float, beyond: bool
) -> None:
    assert beyond_tf32(judged(error), lambda: [[output("y", tf32)]]) is beyond


SPECTRUM = graph(
    """g (float[1,4,64] x) => (float[1,8,33] y) <float e = {1e-9}, float[8,4,32] w = {BASIS}> {
        c = Conv(x, w) s = Mul(c, c) a = Add(s, e) y = Log(a) }""".replace(
        "BASIS", ", ".join(f"{v:.6f}" for v in np.random.default_rng(0).standard_normal(1024))
    )
)


def test_fix_recommends_an_engine_without_tf32_where_that_is_the_cure() -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((1, 4, 64)) * np.geomspace(1e-4, 30, 64)
    result = rewriter.fix(SPECTRUM, inputs={"x": x.astype(np.float32)}, build=False, repair=False)
    (check,) = (one for one in result.checks if one.name == "emulation")
    assert check.tf32_off is not None and check.tf32_off < 0.1 * check.error
    assert "with TF32 off" in check.summary
    assert result.conclusion.remedy.startswith("build this file with TF32 off")


@values
def test_where_tf32_misses_the_tolerance_a_file_that_is_no_worse_is_no_failure(
    result: tuple[float, ...], own: tuple[float, ...], off: float, excuse: str
) -> None:
    check = replace(samples(*((output("y", error),) for error in result)), tf32_off=off)
    found = limited_by_tf32(check, engine(*own))
    assert found.excuse == excuse and found.passed is bool(excuse)
    asked = limited_by_tf32(check, engine(*own), asked=True)
    assert asked.excuse == (excuse if excuse == "tf32-off" else ""), "a tolerance of the user's"
    assert ("tf32" in gap_kinds((found,), None)) is bool(excuse)


def test_an_excuse_within_the_tolerance_of_tf32_is_no_gap() -> None:
    check = replace(as_fp32(failed(output("y", 0.006)), engine(0.0045)), tf32_off=0.5)
    assert check.excuse == "as-fp32" and limited_by_tf32(check, engine(0.0045)) is check


def test_an_output_that_passes_by_its_probabilities_is_no_gap() -> None:
    """TF32 excuses a part of its classes, and moves the output beyond 0.005, too, which nothing needs."""
    fair = ProbabilityError("Softmax", 0.03, 1e-3, 0.01, 1.0, True)
    whole = replace(output("y", 0.006), probability=fair)
    rare = replace(output("y (rare)", 0.11, 0.1), of="y", probability=fair)
    own = [[replace(o, relative_l2=1.1 * o.relative_l2) for o in (whole, rare)]]
    check = as_fp32(failed(whole, rare), lambda: own)
    assert check.excuse == "as-fp32" and {o.tolerance for o in check.outputs} == {5e-3, 0.1}
    assert limited_by_tf32(check, lambda: own) is check
    assert gap_kinds((check,), None) == ("build",)


def test_noise_of_another_run_excuses_nothing() -> None:
    """With optimisations ONNX Runtime drops other values: their distance is no rounding."""
    source = graph(
        "g (float[8,64] x) => (float[8,64] y) <float p = {0.3}, bool t = {1}> "
        "{ d = Dropout(x, p, t) y = Tanh(d) }"
    )
    feeds = [{"x": np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)}]
    assert conditioning(source, feeds, expected_outputs(source, feeds)) == {}
