"""What reports show of engines that ran: builds, latencies, and where their error comes from."""

import io
import re
from dataclasses import replace

import pages
import pytest
from command_lines import flat

from rewriter.report import html, terminal
from rewriter.report import locate as locate_report
from rewriter.report import verify as verify_report
from rewriter.report.results import VerifyResult
from rewriter.runtime.engines.protocol import Latency
from rewriter.runtime.metrics.outputs import OutputComparison
from rewriter.verification.compare_runs import BuildRun
from rewriter.verification.locate.location import Location, Step
from rewriter.verification.verdict import Check, Verdict

FAST, SLOW = Latency(50.0, 1.5, 200, True), Latency(200.0, 4.0, 1, False)


def on_a_gpu() -> VerifyResult:
    return replace(
        pages.verified(),
        engine="TensorRT 10.15",
        device="NVIDIA H200",
        latency=FAST,
        reference_latency=SLOW,
        builds=(BuildRun(0, "ok", "", 2e-3, FAST), BuildRun(1, "crashed", "SIGSEGV", None, None)),
    )


def in_a_terminal(result: VerifyResult, verbosity: int) -> str:
    stream = io.StringIO()
    verify_report.print_result(result, terminal.console(stream), verbosity=verbosity)
    return flat(stream.getvalue())


def test_the_terminal_shows_both_latencies_and_how_they_were_measured() -> None:
    text = in_a_terminal(on_a_gpu(), 0)
    assert "(TensorRT 10.15 on NVIDIA H200)" in text
    assert "Latency 50.0 us (+- 1.5, 200 repeats, CUDA graph)" in text
    assert "the original in FP32 without TF32: 200.0 us (+- 4.0, 1 repeat, plain launches)" in text
    alone = in_a_terminal(replace(on_a_gpu(), engine="onnxruntime", device="CPU", reference_latency=None), 0)
    assert "(onnxruntime on CPU)" in alone
    assert "200 repeats, wall clock)" in alone and "without TF32: 200.0" not in alone


def test_several_builds_are_a_table_with_the_reason_why_one_did_not_run() -> None:
    text = in_a_terminal(on_a_gpu(), 1)
    assert "0 ok 0.002 50.0 1.5" in text and "1 SIGSEGV" in text
    assert "Builds of the fixed model" not in in_a_terminal(replace(on_a_gpu(), builds=()), 1)


def test_the_worst_outputs_of_a_failed_check_are_named() -> None:
    outputs = tuple(
        OutputComparison(name, error, 1.0, 0.5, finite, 5e-3)
        for name, error, finite in (("a", 1e-3, True), ("b", 0.25, True), ("c", 0.5, True), ("d", 0.0, False))
    )
    failed = Check("run", False, "NOT within 0.005", outputs, ("build 1: crashed",))
    missing = Check("reference", None, "the original did not run here")
    text = in_a_terminal(replace(on_a_gpu(), verdict=Verdict((failed, missing))), 0)
    assert text.startswith("VERIFICATION FAILED (run) (TensorRT 10.15 on NVIDIA H200): the fixed model")
    assert "Failed NOT within 0.005 build 1: crashed d: NaN or infinity, allowed 0.005 c: 0.5" in text
    assert text.index("c: 0.5") < text.index("b: 0.25, allowed 0.005") and "a: 0.001" not in text
    assert "Missing reference: the original did not run here" in text


def test_the_page_shows_them_too() -> None:
    text = flat(re.sub("<[^>]*>", " ", html.as_html(on_a_gpu())))
    assert "Latency 50.0 us (+- 1.5, 200 repeats" in text and "0 ok 0.002 50.0 1.5 1 SIGSEGV" in text
    assert "Builds of the fixed model" not in html.as_html(replace(on_a_gpu(), builds=()))


def _step(name: str, error: float | None, note: str = "") -> Step:
    return Step(name, f"node_{name}", "Op", error, note=note)


FIRST = _step("b", 0.5)
LOCATED = Location("TensorRT 10.15", 1e-3, (_step("y", 0.5),), first=FIRST, right=(_step("a", 1e-5),))
HIDING = (_step("h", None, "the outputs change when it is marked"),)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        pytest.param(LOCATED, "The first wrong tensor is b of node node_b (Op), error 0.5", id="found"),
        pytest.param(LOCATED, "shared tensors before it are correct", id="for certain"),
        pytest.param(LOCATED, "last correct: a (1e-05)", id="what is right before it"),
        pytest.param(replace(LOCATED, right=()), "last correct: the inputs of the model", id="all is wrong"),
        pytest.param(
            replace(LOCATED, exact=False, hiding=HIDING),
            "or one shortly before it that cannot be measured",
            id="in a fusion",
        ),
        pytest.param(
            replace(LOCATED, exact=False, hiding=HIDING),
            "Hidden h of node_h (Op): the outputs change when it is marked",
            id="what the fusion hides",
        ),
        pytest.param(
            replace(LOCATED, kernel=("conv", "relu")), "Kernel one kernel computes conv, relu", id="a fusion"
        ),
        pytest.param(replace(LOCATED, exact=False), "or one before it that was not measured", id="no time"),
        pytest.param(
            replace(LOCATED, first=None),
            "y is wrong, but is no float tensor that both models have",
            id="not found",
        ),
        pytest.param(
            replace(LOCATED, first=None, outputs=(_step("y", 1e-4),)),
            "All outputs are within 0.001 of the original",
            id="nothing is wrong",
        ),
        pytest.param(
            replace(LOCATED, tensors=9, compared=5, given=7, builds=3, discarded=1),
            "compared 5 of 9 tensors that both models have, 7 tensors between kernels, 3 builds with "
            "marks, 1 of them discarded because marks changed the outputs (relative L2",
            id="how it was found",
        ),
    ],
)
def test_where_the_error_comes_from(found: Location, words: str) -> None:
    stream = io.StringIO()
    locate_report.print_result(found, terminal.console(stream))
    assert words in flat(stream.getvalue())
