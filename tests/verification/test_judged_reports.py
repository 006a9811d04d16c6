"""What a build's report and the outcomes of runs become, without a TensorRT."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx.parser
import pytest
from onnx import TensorProto

from rewriter.ir.model import Array, load
from rewriter.report.remarks import worded
from rewriter.runtime.engines.build import BuildReport, NetworkLayer, ParserError
from rewriter.runtime.engines.protocol import EngineOutcome
from rewriter.runtime.engines.tensor_files import write_samples
from rewriter.runtime.metrics.tolerances import Tolerance
from rewriter.target import Target
from rewriter.verification.build_check import (
    LACKING,
    NEEDS_GPU,
    BuildExpectation,
    check_operators,
    expectation,
    judged_report,
)
from rewriter.verification.compare_runs import Standard, compare_outputs, run_check
from rewriter.verification.verdict import Check

HALF = int(TensorProto.FLOAT16)
CONV = NetworkLayer("layer", "CONVOLUTION", "conv", (("c", "HALF"),))
NORM = NetworkLayer("norm", "NORMALIZATION", "ln", (("n", "FLOAT"),))
SUM = NetworkLayer("sum", "REDUCE", "", (("s", "HALF"),))
WARNED = "TensorRT warns of a decomposed norm in FP16, whose squares may overflow"
WARNING = "running layernorm nodes in FP16 may overflow"
BUILT = BuildReport("RTX", "1.7", True, (CONV, NORM), (("x", "FLOAT"),), engine_bytes=3 << 20, build_s=2.25)
UNBUILT = replace(BUILT, engine_bytes=None)
REFUSED = BuildReport("RTX", "1.7", False, parser_errors=(ParserError("n", "Foo", "unknown operator"),))


def test_a_build_as_planned() -> None:
    check = judged_report(BUILT, BuildExpectation(1, {"c": HALF, "x": int(TensorProto.FLOAT)}))
    assert (check.passed, check.built, check.details) == (True, True, ())
    words = "RTX 1.7 built 2 layers, 1 of them NORMALIZATION, 3 MiB, in 2.2 s; types as planned"
    assert worded(check).summary == words
    plain = judged_report(replace(BUILT, layers=(CONV,)), BuildExpectation())
    assert "NORMALIZATION" not in worded(plain).summary


NORMS = "the model has 2 normalisation operators, the network 1 NORMALIZATION layers"
DECOMPOSED = replace(BUILT, layers=(SUM,), warnings=(WARNING,))
FINDINGS = {
    "a norm is missing": (BUILT, BuildExpectation(2), NORMS),
    "another type": (BUILT, BuildExpectation(0, {"n": HALF}), "tensor n of ln is FLOAT, planned HALF"),
    "an input": (BUILT, BuildExpectation(0, {"x": HALF}), "tensor x of an input is FLOAT, planned HALF"),
    "a norm in FP16": (DECOMPOSED, BuildExpectation(), f"{WARNED}; reductions in FP16: sum"),
    "a norm that no layer shows": (
        replace(BUILT, warnings=(WARNING,)),
        BuildExpectation(),
        f"{WARNED}; reductions in FP16: none",
    ),
}


@pytest.mark.parametrize(("report", "expected", "fault"), FINDINGS.values(), ids=FINDINGS.keys())
def test_one_finding(report: BuildReport, expected: BuildExpectation, fault: str) -> None:
    check = judged_report(report, expected)
    assert (check.passed, check.built) == (False, True)
    assert check.details[0] == fault
    assert worded(check).summary.endswith("; 1 finding")


IN_FP32 = replace(DECOMPOSED, layers=(replace(SUM, outputs=(("s", "FLOAT"),)),))
SOUND = {
    "more norms than needed": (BUILT, BuildExpectation(0)),
    "a type nobody plans": (BUILT, BuildExpectation(0, {"c": int(TensorProto.INT64)})),
    "FP16 sums without a warning": (replace(BUILT, layers=(SUM,)), BuildExpectation()),
    "sums that were measured": (DECOMPOSED, BuildExpectation(norms_in_range=frozenset({"s"}))),
    "sums in FP32": (IN_FP32, BuildExpectation(norms_in_range=frozenset({"other"}))),
}


@pytest.mark.parametrize(("report", "expected"), SOUND.values(), ids=SOUND.keys())
def test_no_finding(report: BuildReport, expected: BuildExpectation) -> None:
    check = judged_report(report, expected)
    assert check.passed and worded(check).summary.endswith("; types as planned")


@pytest.mark.parametrize(("number", "listed"), [(2, 2), (10, 10), (11, 11), (13, 11)])
def test_ten_findings_of_a_kind_are_listed(number: int, listed: int) -> None:
    layers = tuple(replace(CONV, outputs=((f"c{i}", "FLOAT"),)) for i in range(number))
    check = judged_report(
        replace(BUILT, layers=layers), BuildExpectation(0, {f"c{i}": HALF for i in range(99)})
    )
    assert len(check.details) == listed
    more = f"and {number - 10} more tensors of another type than planned"
    assert (check.details[-1] == more) is (number > 10)
    assert worded(check).summary.endswith(f"; {listed} findings")


def test_a_parser_that_refuses() -> None:
    check = judged_report(REFUSED, BuildExpectation(3))
    assert (check.passed, check.built) == (False, False)
    assert worded(check).summary == "RTX 1.7 refuses the model"
    assert check.details == ("node n (Foo): unknown operator",), "what was not parsed misses no norm"


POOLS = load(
    onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
    g (float[1,2,8,8] x) => (float[1,2,6,6] y, int64[1,2,6,6] k, int64[4,n] i) {
        [pool] y, k = MaxPool<kernel_shape = [3, 3]>(x) [some] i = NonZero(x) }""")
)
RTX = BuildReport("tensorrt_rtx", "1.7.1.116", True, engine_bytes=1)


def refusing(*errors: ParserError) -> BuildReport:
    return replace(RTX, parsed=False, engine_bytes=None, parser_errors=errors)


SOME = ParserError("some", "NonZero", "plugin was not found")
POOL, OTHER = replace(SOME, node="pool", op="MaxPool"), replace(SOME, node="other", op="Relu")


@pytest.mark.parametrize(
    ("report", "target", "passed", "names"),
    [
        pytest.param(RTX, "tensorrt-rtx", True, "", id="its parser takes what the table refuses"),
        pytest.param(RTX, "tensorrt 10.3", True, "", id="so does that of another library"),
        pytest.param(refusing(POOL), "tensorrt 10.3", False, "pool", id="both refuse"),
        pytest.param(refusing(SOME), "tensorrt-rtx 1.7", False, "some pool", id="one, and the table"),
        pytest.param(refusing(OTHER), "tensorrt 10.3", False, "other pool", id="unknown"),
    ],
)
def test_a_parser_comes_before_the_table(report: BuildReport, target: str, passed: bool, names: str) -> None:
    check = judged_report(report, expectation(POOLS, target=Target.parse(target)))
    assert (check.passed, check.built) == (passed, passed)
    assert [name for name, _ in check.refused] == names.split()


def test_what_the_target_takes_is_no_refusal_of_another_library() -> None:
    model = load(
        onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        g (float[4,4] x) => (int64[2,n] i) { [some] i = NonZero(x) }""")
    )
    report = refusing(SOME)
    check = judged_report(report, expectation(model, target=Target.parse("tensorrt 10.3")))
    assert check.passed is None and "another TensorRT" in check.details[-1]
    assert judged_report(report, expectation(model, target=Target.parse("tensorrt-rtx"))).passed is False


@pytest.mark.parametrize("condition", ["outputs <= 1", '(kind == "a" || kind == "b")'])
@pytest.mark.parametrize("words", ['"only one output."', '"only one " "output."'])
def test_the_sentence_has_node_attribute_remedy_and_the_parser_s_own_words(
    condition: str, words: str
) -> None:
    error = ParserError("pool", "MaxPool", f"{condition} && {words}")
    expected = expectation(POOLS, target=Target.parse("tensorrt-rtx 1.5"))
    check = judged_report(refusing(error, ParserError("pool", "MaxPool", "")), expected)
    sentence = "node pool (MaxPool): tensorrt-rtx 1.7.1 takes no MaxPool with k (only one output.)"
    assert check.details == (sentence, "what to do: leave the indices out")
    assert check.advice == "leave the indices out"


@pytest.mark.parametrize(("node", "shown"), [("r", "r"), ("", "a Resize")])
def test_a_shape_from_floats_needs_a_gpu_and_is_no_refusal(node: str, shown: str) -> None:
    error = ParserError(node, "Resize", f"Internal Error (Assertion !{NEEDS_GPU} failed)")
    check = judged_report(refusing(error), BuildExpectation())
    assert check.passed is None and f"needs a GPU to parse the model: {shown} has" in worded(check).summary


def test_without_a_build_the_table_decides() -> None:
    assert check_operators(expectation(POOLS, plugins=None)) is None, "a library of plugins may have it"
    check = check_operators(expectation(POOLS, target=Target.parse("10.3")))
    assert check is not None and check.built is False and check.refused == (("pool", "MaxPool"),)


def test_a_builder_that_gives_no_engine() -> None:
    errors = tuple(f"error {number}" for number in range(12))
    check = judged_report(replace(UNBUILT, errors=errors, hint="ask again"), BuildExpectation())
    assert (check.passed, check.built) == (False, False)
    assert worded(check).summary == "RTX 1.7 did not build the model: 10 findings"
    said = (*(f"error {n}" for n in range(2, 12)), "what to do: ask again")
    assert (check.details, check.advice) == (said, "ask again")
    silent = judged_report(UNBUILT, BuildExpectation())
    assert silent.details == ("no engine, and no error message",) and worded(silent).summary.endswith(
        ": 1 finding"
    )


def test_what_the_user_has_to_give_is_no_fault_of_the_model() -> None:
    report = replace(UNBUILT, obstacle="the shape of x is not known", hint="give --shape x=1x3")
    check = judged_report(report, BuildExpectation())
    assert (check.passed, check.built) == (None, False)
    assert worded(check).summary == "not built: the shape of x is not known"
    assert check.details == ("what to do: give --shape x=1x3",)
    wrong = judged_report(report, BuildExpectation(0, {"n": HALF}))
    assert wrong.passed is False, "it does not hide a wrong type"


@pytest.mark.parametrize("part", LACKING)
def test_an_operator_that_this_library_lacks_is_no_verdict(part: str) -> None:
    check = judged_report(replace(UNBUILT, errors=(f"Foo {part} bar",)), BuildExpectation())
    assert check.passed is None and check.built is False
    assert worded(check).summary == "not built: RTX 1.7 lacks what this model needs"
    assert check.details[-1].startswith("another TensorRT")
    mixed = judged_report(replace(UNBUILT, errors=(f"Foo {part} bar", "another error")), BuildExpectation())
    assert mixed.passed is False, "there is another error"


def test_a_message_of_a_build_that_succeeded_is_no_lack() -> None:
    check = judged_report(replace(BUILT, errors=(f"Foo {LACKING[1]}",)), BuildExpectation())
    assert check.passed is True


def test_ten_warnings_are_listed_those_about_precision_first() -> None:
    warnings = (*(f"odd {n}" for n in range(12)), "weights overflow in FP16")
    check = judged_report(replace(BUILT, warnings=warnings), BuildExpectation())
    assert check.passed and len(check.details) == 10
    assert check.details[0].startswith("precision: a weight does not fit FP16")
    assert check.details[1:] == tuple(f"warning: odd {n}" for n in range(9))


def outcomes(folder: Path, *builds: Array | float | EngineOutcome) -> list[EngineOutcome]:
    """Builds whose output, ones, is off by a share, or those that did not run; arrays are of each sample."""
    found = []
    for number, one in enumerate(builds):
        if not isinstance(one, EngineOutcome):
            outputs = write_samples(
                folder / str(number), [{"y": 1.0 + np.ones(4) * off} for off in np.atleast_1d(one)]
            )
            one = EngineOutcome("fixed", number, "ok", device="a GPU", library="RTX", outputs=outputs)
        found.append(one)
    return found


L2 = Standard(Tolerance(0.1, "relative-l2", "a test"))


def test_the_worst_sample_of_the_worst_build_is_judged(tmp_path: Path) -> None:
    truth = [{"y": np.ones(4)}] * 2
    builds = outcomes(tmp_path, np.array([0.01, 0.02]), np.array([0.2, 0.0]))
    found = run_check(truth, builds, L2)[1]
    assert not found.passed and run_check(truth, builds[:1], L2)[1].passed
    assert [run.error for run in found.builds] == pytest.approx([0.02, 0.2])
    assert found.error == pytest.approx(0.2)
    assert (found.worst.statistics[0].build, found.worst.statistics[0].sample) == (1, 0)
    crashed = EngineOutcome("fixed", 1, "crashed", "SIGSEGV")
    assert not run_check(truth, [builds[0], crashed], L2)[1].passed, "one that did not run fails the others"


def test_an_output_of_another_shape_fails(tmp_path: Path) -> None:
    found = run_check([{"y": np.ones(5)}], outcomes(tmp_path, 0.0), L2)[1]
    assert (found.passed, found.error) == (False, math.inf)
    assert "shape (4,), expected (5,)" in found.comparisons[0].note


def run(made: list[EngineOutcome], tolerance: float = 0.1, metric: str = "relative-l2") -> Check:
    return run_check([{"y": np.ones(4)}], made, Standard(Tolerance(tolerance, metric, "a test")), 1.5)[0]


@pytest.mark.parametrize(("error", "passed"), [(0.05, True), (0.25, False)], ids=["within", "beyond"])
def test_the_check_of_one_build(tmp_path: Path, error: float, passed: bool) -> None:
    check = run(outcomes(tmp_path, error))
    relation = "within" if passed else "NOT within"
    assert worded(check).summary == f"RTX on a GPU: largest error {error:.2g} in y, {relation} 0.1"
    assert (check.passed, check.seconds, check.value) == (passed, 1.5, None)
    assert check.details == ("allowed: a test",) and check.device == "a GPU"


def test_builds_that_did_not_run_are_named_with_their_reasons_and_logs(tmp_path: Path) -> None:
    made = [
        EngineOutcome("fixed", 0, "crashed", "SIGSEGV", "update the driver", log="loading\nDUMP"),
        EngineOutcome("fixed", 1, "error", "no memory", log="LOG"),
        EngineOutcome("fixed", 2, "timeout", "too slow", log="WAITING"),
    ]
    check = run(made, metric="psnr")
    assert (worded(check).summary, check.value) == ("the fixed model did not run: SIGSEGV", None)
    assert check.details == (
        "allowed: a test",
        "build 0: crashed: SIGSEGV",
        "log: loading",
        "log: DUMP",
        "what to do: update the driver",
        "build 1: error: no memory",
        "build 2: timeout: too slow",
        "log: WAITING",
    )
    check = run([*outcomes(tmp_path, 0.01, 0.02), replace(made[1], build=2)], 0.015, metric="max-abs")
    assert check.passed is False and check.value is not None and not check.value.met
    assert worded(check).summary == (
        "RTX on a GPU: max-abs 0.02, NOT within 0.015 (0.01 to 0.02 over 3 builds); 1 of 3 builds did not run"
    )


@pytest.mark.parametrize(
    ("metric", "value", "worst"), [("relative-l2", 0.0, math.inf), ("psnr", math.inf, -math.inf)]
)
def test_without_outputs_no_error_and_without_a_sample_none_right(
    metric: str, value: float, worst: float
) -> None:
    standard = Standard(Tolerance(0.1, metric, "a test"))
    found = compare_outputs([{}], [{}], standard)
    assert (found.error, found.passed, found.comparisons) == (value, True, ())
    assert compare_outputs([], [], standard).error == worst
