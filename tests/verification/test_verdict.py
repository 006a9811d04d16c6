"""The verdict as data: which checks pass, how far a result is from its tolerance, and what is reported."""

import math

import pytest
from tables import values

from rewriter.report.remarks import error
from rewriter.runtime.metrics.outputs import OutputComparison
from rewriter.verification.locate import Location
from rewriter.verification.locate.location import Step
from rewriter.verification.verdict import Check, MetricValue, Verdict, log_lines

VALUE = MetricValue("psnr", 38.0, 40.0, False)


@pytest.mark.parametrize(
    ("value", "excess"),
    [
        pytest.param(MetricValue("psnr", 41.0, 40.0, True), 0.0, id="met"),
        pytest.param(VALUE, 1.05, id="missed by a twentieth"),
        pytest.param(MetricValue("cosine-distance", 0.5, 0.0, False), 1.5, id="a tolerance of zero"),
        pytest.param(MetricValue("psnr", -math.inf, 40.0, False), math.inf, id="infinitely far"),
        pytest.param(MetricValue("psnr", math.nan, 40.0, False), math.inf, id="NaN"),
    ],
)
def test_how_far_a_metric_is_from_its_tolerance(value: MetricValue, excess: float) -> None:
    assert value.excess == pytest.approx(excess)
    assert Check("run", None, (), value=value).error == pytest.approx(excess)


def test_a_check_without_outputs_is_no_candidate() -> None:
    assert Check("run", None).error == math.inf


COMPARED = (OutputComparison("y", 0.0, 0.0, 1.0, True, 1e-3),)


@pytest.mark.parametrize(
    ("checks", "passed", "compared"),
    [
        pytest.param((), False, False, id="no check"),
        pytest.param((Check("build", None, ()),), False, False, id="none was possible"),
        pytest.param((Check("build", True, ()), Check("run", None, ())), True, False, id="it builds"),
        pytest.param(
            (Check("emulation", True, (), COMPARED), Check("build", None, ())), True, True, id="both"
        ),
        pytest.param(
            (Check("emulation", True, (), COMPARED), Check("run", False, ())), False, True, id="one failed"
        ),
        pytest.param((Check("run", None, (), COMPARED),), False, False, id="outputs without a judgement"),
        pytest.param((Check("run", False, (), value=VALUE),), False, True, id="a metric of all outputs"),
    ],
)
def test_a_verdict(checks: tuple[Check, ...], passed: bool, compared: bool) -> None:
    assert (Verdict(checks).passed, Verdict(checks).compared) == (passed, compared)


def test_the_end_of_a_log_is_reported_without_the_stack_of_python() -> None:
    log = "\n".join([*map(str, range(20)), "", "Fatal Python error: Aborted", "  File x.py"])
    assert log_lines(log) == tuple(f"log: {line}" for line in range(5, 20))


@values
def test_the_error_that_is_shown_is_the_one_closest_to_its_tolerance(
    errors: list[tuple[float, float]], passed: bool, words: str
) -> None:
    outputs = tuple(OutputComparison("y", size, 1.0, 1.0, True, allowed) for size, allowed in errors)
    assert error(Check("emulation", passed, (), outputs)) == words


def _step(name: str, error: float | None) -> Step:
    return Step(name, name, "Op", error)


def test_an_output_without_a_measured_error_is_wrong() -> None:
    outputs = tuple(map(_step, "abcd", (1e-3, 2e-3, None, math.nan)))
    assert [step.tensor for step in Location("ONNX Runtime", 1e-3, outputs).wrong] == ["b", "c", "d"]


def test_a_summary_shows_what_was_not_measured() -> None:
    found = Location("ONNX Runtime", 1e-3, (_step("y", 0.5), _step("z", None)), first=_step("a", 0.25))
    rows = [text for _, text in found.summary()]
    assert rows[0] == "a (Op 'a', relative L2 0.25)"
    assert "z (Op 'z', not measured)" in rows
    assert rows[-1] == "ONNX Runtime; above 0.001 is wrong"
