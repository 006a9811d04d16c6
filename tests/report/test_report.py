"""Reports: what a reader sees at 80 columns, and what a program gets as JSON."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pages
import pytest
from command_lines import flat
from graphs import graph
from tables import values

import rewriter
from rewriter.ir.model import Model, write_json
from rewriter.ir.plan import Decision, Plan, Range
from rewriter.jobs.fix.result import End
from rewriter.jobs.fix.selection import LatencyShare
from rewriter.passes.base import Change, Refusal
from rewriter.pipeline.driver import PassResult
from rewriter.report import fix as report
from rewriter.report import html, terminal
from rewriter.report import locate as locate_report
from rewriter.report import verify as verify_report
from rewriter.report.causes import Cause
from rewriter.report.fix import next_step
from rewriter.report.pipeline import latency
from rewriter.report.progress import _TimeLeft
from rewriter.report.results import FixResult, VerifyResult
from rewriter.report.tables import grouped
from rewriter.report.terminal import shortened
from rewriter.runtime.engines.protocol import Latency
from rewriter.runtime.inputs.samples import DataSource, Room
from rewriter.runtime.metrics.outputs import OutputComparison
from rewriter.runtime.ranges import TensorAtDepth
from rewriter.target import Target
from rewriter.verification.compare_runs import BuildRun
from rewriter.verification.locate.location import Location, Step
from rewriter.verification.verdict import Check, Verdict

STATIC = graph("g (float[1,3,8,8] x) => (float[1,3,8,8] y) { y = Relu(x) }")
DYNAMIC = graph(
    "g (float[n,3,8,w] x, float[4] z) => (float[n,3,8,w] y, float[4] q) { y = Relu(x) q = Relu(z) }"
)


def decision(index: int) -> Decision:
    tensor = f"/block.{index}/Pow_output_0"
    measured = Range(0.0, index % 10 * 1e6, 1e6, finite=True)
    return Decision(
        f"/block.{index}/norm[0]/Pow",
        "Pow",
        f"0:{tensor}",
        "overflow",
        f"{tensor} exceeds 32752",
        tensor,
        measured,
    )


def output(name: str = "y", error: float = 7e-4, *, finite: bool = True) -> OutputComparison:
    return OutputComparison(name, error, 0.5, 0.999999, finite, 5e-3)


GOOD = Verdict(
    (
        Check("structure", True, (), (output(error=0.0),), seconds=0.2, summary="FP32 result is bit-equal"),
        Check("emulation", True, (), (output(),), seconds=0.4, summary="FP16 emulated: largest error 0.0007"),
        Check("build", None, summary="no TensorRT is installed"),
    )
)
BUILT = Verdict((*GOOD.checks[:2], Check("build", True, (), built=True, summary="built")))
REACHED = Check("tolerance", True, summary="the cheapest of 3 plans that reach 0.001")
WRONG = (output(error=0.3, finite=False),)
BAD = Verdict((Check("emulation", False, (), WRONG, summary="FP16 emulated: NOT within"),))


def result(**changes: object) -> FixResult:
    whole = FixResult(
        model=STATIC,
        output=Path("out/fixed.onnx"),
        pipeline="clean-casts,isolate-clip",
        target=Target(),
        passes=[
            PassResult("clean-casts", (), (), 0.01),
            PassResult(
                "isolate-clip",
                tuple(Change(f"/conv.{i}/Clip", "Clip became Max and Min") for i in range(35)),
                tuple(Refusal(f"/head.{i}/Clip", "its bounds are computed") for i in range(14)),
                0.2,
            ),
        ],
        plan=Plan("fp16", decisions=tuple(decision(i) for i in range(17)), float_nodes=100),
        data=DataSource("4 samples from data.npz", 4, real=True),
        verdict=GOOD,
        end=End("verified"),
        seconds={"load": 0.1, "build": 3.25},
    )
    for name, value in changes.items():
        setattr(whole, name, value)
    return whole


def printed(shown: FixResult, verbosity: int = 0) -> str:
    stream = io.StringIO()
    out = terminal.console(stream)
    report.print_result(shown, out, verbosity=verbosity)
    return stream.getvalue()


SHARES = (LatencyShare("FP32", 0.44, measured=False), LatencyShare("plain FP16", 1.07, measured=True))

CAUSE = Cause(
    "unfused-norm",
    "squares inside 3 decomposed LayerNorms reach 7e7, FP16 ends at 65504",
    "3 norms (17 nodes in FP32)",
    ("a", "b"),
    7e7,
    65504.0,
)


def test_the_summary_says_what_was_wrong_what_was_done_and_what_is_next() -> None:
    shown = result(causes=(CAUSE,), before=(output(error=0.32),))
    lines = [flat(line) for line in printed(shown).splitlines()]
    assert lines[0] == "Emulated, NOT built: out/fixed.onnx (17 of 100 float nodes in FP32)"
    assert lines[1] == "Missing an engine: no TensorRT is installed"
    text = " ".join(lines)
    assert "Error 0.32 in plain FP16, now 0.0007, within 0.005 (relative L2 of y; emulated)" in text
    assert f"Wrong {CAUSE.what}: 3 norms (17 nodes in FP32)" in text
    assert "Done rewritten by isolate-clip (35) 83 nodes in FP16, 17 in FP32 for hazards" in text
    assert "Next trtexec --onnx=out/fixed.onnx" in text
    assert len(lines) <= 16


def test_fp32_that_is_free_is_counted_apart() -> None:
    lacking = ("no-lower-type", "no-schema")  # the second is the kind of a hazard, too
    rules = ("epilogue", "softmax", "tolerance", "user", "between-islands", *lacking, decision(4).rule)
    decisions = tuple(replace(decision(i), rule=rule) for i, rule in enumerate(rules))
    text = flat(printed(result(plan=Plan("fp16", decisions=decisions, float_nodes=100))))
    free = Plan("fp16", decisions=tuple(replace(d, rule="softmax") for d in decisions), float_nodes=10)
    assert "2 nodes in FP16, 8 in FP32 at no cost" in flat(printed(result(plan=free)))
    words = "(1 for hazards, 2 at no cost, 1 as asked, 1 by the search, 2 for lack of FP16, 1 between these)"
    assert f"92 nodes in FP16, 8 in FP32 {words} {decision(5).reason}: 1 node" in text


def test_many_causes_and_warnings_are_counted() -> None:
    causes = tuple(replace(CAUSE, what=f"cause {i}") for i in range(9))
    text = flat(printed(result(causes=causes, warnings=[f"warning {i}" for i in range(5)])))
    assert "cause 3" in text and "cause 4" not in text
    assert "... and 5 more: -v shows all" in text
    assert "warning 2" in text and "warning 3" not in text
    full = flat(printed(result(causes=causes), verbosity=1))
    assert "cause 8" in full


def test_a_model_that_was_fine_is_said_to_be() -> None:
    depth = (TensorAtDepth(0, "y", "n", "Relu", "0:y", Range(0.0, 1.0, 0.5, True)),)
    plain = result(plan=Plan("fp16", float_nodes=9), before=(output(error=1e-3),), depth=depth)
    assert "nothing: no hazard was found, and plain FP16 passes, too" in flat(printed(plain))
    rounding = replace(plain, before=(output(error=1e-2),))
    assert "by rounding: no value is out of range" in flat(printed(rounding))
    given = flat(printed(replace(rounding, depth=())))
    assert "by rounding" not in given and "as planned" in given, "nothing was measured for a given plan"


def test_a_plan_that_is_all_fp32_is_said_to_be() -> None:
    everything = result(plan=replace(result().plan or Plan("fp16"), float_nodes=17))
    assert "(ALL 17 float nodes in FP32)" in printed(everything, verbosity=-1)
    assert "ALL 17 float nodes in FP32, nothing in FP16" in flat(printed(everything))
    repaired = result(plan=None, repairs=["all of it in FP32 (TF32): every check passes"])
    assert "(ALL of it in FP32)" in printed(repaired, verbosity=-1)


def test_verbose_lists_every_node_in_full() -> None:
    text = printed(result(), verbosity=1)
    assert "more" not in text
    joined = text.replace("\n", "").replace(" ", "")
    for name in [f"/conv.{i}/Clip" for i in range(35)] + [f"/head.{i}/Clip" for i in range(14)]:
        assert name in joined
    for i in range(17):
        assert f"/block.{i}/norm[0]/Pow(Pow)" in joined
    one = printed(result(plan=Plan("fp16", decisions=(decision(3),), float_nodes=9)), verbosity=1)
    assert "overflow FP32 1 3e+06 /block.3/Pow_output_0 exceeds 32752: /block.3" in flat(one)


def test_verbose_prints_each_long_name_whole_on_a_line_of_its_own() -> None:
    name = "/inner/encoder/layer.11/attention/self/query/MatMul/merged/projection/Add_of_all_heads"
    plan = Plan("fp16", decisions=(replace(decision(1), node=name), decision(2)), float_nodes=9)
    lines = printed(result(plan=plan), verbosity=1).splitlines()
    assert f"    {name} (Pow)" in lines
    heads = [line for line in lines if line.startswith("Rule ")]
    assert len(heads) == 1, "rows that names divide are one table"


def test_the_time_left_is_estimated_from_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 10.0, 20.0, 21.0, 31.0])
    monkeypatch.setattr("rewriter.report.progress.time.monotonic", lambda: next(now))
    left = _TimeLeft()
    assert [left.text(done, 5) for done in (0, 1, 2)] == ["", ", about 40 s left", ", about 30 s left"]
    assert [left.text(0, 3), left.text(3, 3)] == ["", ""], "another stage, and its end"


def test_changes_of_the_model_name_no_node() -> None:
    step = PassResult("upgrade-opset", (Change("model", "opset 13 became 17"),), (), 0.0)
    assert "upgrade-opset changed 1 opset 13 became 17 Verif" in flat(printed(result(passes=[step]), 1))


NAMES = [
    pytest.param("/a/b", "/a/b", id="a short name stays"),
    pytest.param(
        "/inner/swin/encoder/layers.0/blocks.0/attention/MatMul",
        ".../blocks.0/attention/MatMul",
        id="a long path keeps its last parts",
    ),
    pytest.param("x" * 40, "..." + "x" * 29, id="a long name without a path keeps its end"),
]


@pytest.mark.parametrize(("name", "short"), NAMES)
def test_long_names_are_cut_at_the_front(name: str, short: str) -> None:
    assert shortened([name]) == {name: short}


def test_different_names_have_different_short_forms() -> None:
    names = [f"/inner/vit/layers.{i}/attention/projection/query/q_proj/MatMul" for i in range(12)]
    short = shortened([*names, *names, ".../projection/query/q_proj/MatMul"])
    assert len(short) == 13 == len(set(short.values()))


@values
def test_texts_are_grouped(texts: list[str], groups: list[str]) -> None:
    assert [text for text, _ in grouped(texts, lambda text: text)] == groups


@pytest.mark.parametrize("verbosity", [-1, 0, 1])
def test_lines_fit_80_columns_but_for_the_command(verbosity: int) -> None:
    text = printed(result(output=Path("fixed.onnx")), verbosity)
    lines = text.splitlines()
    assert text.isascii() and "\x1b" not in text, "no colour in a pipe"
    assert max(len(line) for line in lines if "trtexec" not in line) <= 80


def test_names_that_the_terminal_cannot_encode_do_not_stop_the_report() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    report.print_result(result(warnings=["Knoten \N{GREEK SMALL LETTER PI}"]), terminal.console(stream))
    stream.flush()
    assert b"Note     Knoten ?" in stream.buffer.getvalue()


def test_a_failure_names_the_check_the_output_and_the_file() -> None:
    text = flat(printed(result(verdict=BAD)))
    assert "VERIFICATION FAILED (emulation): out/fixed.onnx" in text
    assert "Error NaN or infinity, NOT within 0.005 (relative L2 of y; emulated)" in text
    assert "Failed emulation: FP16 emulated: NOT within" in text
    assert "Next" not in text and "trtexec" not in text, "a failed model is not to be built"
    full = flat(printed(result(verdict=BAD), verbosity=1))
    assert "emulation y NaN or infinity 0.005 0.5" in full and "emulation FAILED 0.0 FP16 emulated" in full


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        pytest.param({"verdict": None}, "Fixed, NOT verified: out/fixed.onnx", id="no verification"),
        pytest.param(
            {"verdict": Verdict((REACHED,))},
            "Fixed, NOT verified: out/fixed.onnx",
            id="a goal that was reached verifies nothing",
        ),
        pytest.param(
            {"verdict": Verdict((replace(REACHED, passed=False),))},
            "VERIFICATION FAILED (tolerance): out/fixed.onnx",
            id="a goal that was not reached",
        ),
        pytest.param(
            {"verdict": Verdict((REACHED, *BUILT.checks))},
            "Verified by emulation, built without a GPU: out/fixed.onnx",
            id="a goal and a verification",
        ),
        pytest.param({"output": None}, "Emulated, NOT built: nothing written", id="a dry run"),
        pytest.param(
            {
                "data": DataSource("1 random sample", 1, real=False),
                "verdict": BUILT,
                "latency_shares": (LatencyShare("FP32", 0.5, measured=True),),
            },
            "Emulated on random data, which is no proof, built without a GPU, 2 times as fast as FP32: out",
            id="random data",
        ),
        pytest.param(
            {"data": DataSource("2 samples", 2, real=True, constant=True)},
            "Emulated on constant samples, which is no proof, NOT built: out/fixed.onnx",
            id="constant samples",
        ),
        pytest.param(
            {"data": DataSource("2 samples", 2, real=True, repeated=True), "verdict": BUILT},
            "Emulated on one sample, 2 times, which is no proof, built without a GPU: out/fixed.onnx",
            id="a sample repeated",
        ),
        pytest.param(
            {"verdict": BUILT, "latency_shares": (LatencyShare("FP32", 0.5, measured=False),)},
            "built without a GPU, 2 times as fast as FP32 (estimated), as accurate: out/fixed.onnx",
            id="a gain",
        ),
        pytest.param(
            {"verdict": BUILT, "latency_shares": (LatencyShare("FP32", 0.97, measured=True),)},
            "built without a GPU, as slow as FP32: 97 %: out/fixed.onnx",
            id="no gain",
        ),
        pytest.param(
            {"verdict": BUILT, "latency_shares": SHARES},
            "built without a GPU, slower than plain FP16: 107 %: out/fixed.onnx",
            id="a measured latency before an estimated one",
        ),
        pytest.param(
            {"verdict": Verdict((*GOOD.checks[:2], Check("run", True, (), (output(),), summary="on a GPU")))},
            "Verified on this GPU: out/fixed.onnx",
            id="an engine ran it",
        ),
        pytest.param({"plan": None}, "Emulated, NOT built: out/fixed.onnx\n", id="structure only"),
        pytest.param({"verdict": Verdict(())}, "VERIFICATION FAILED (no check could be made)", id="no check"),
        pytest.param(
            {"verdict": Verdict((Check("structure", None), Check("build", True)))},
            "Fixed, and builds, but no result could be compared: out/fixed.onnx",
            id="a build alone",
        ),
    ],
)
def test_verdict_line(changes: dict[str, object], line: str) -> None:
    assert line in printed(result(**changes), verbosity=-1)


def test_the_origin_of_probe_results_is_printed() -> None:
    recorded = Target("tensorrt-rtx", known_from="recorded of tensorrt-rtx 1.6 on a GPU, not measured here")
    text = flat(printed(result(target=recorded), verbosity=1))
    assert "Target: tensorrt-rtx; probe results: recorded of tensorrt-rtx 1.6" in text
    assert report.as_dict(result(target=recorded))["probe"] == recorded.known_from
    assert "; no probe results, rules assume the worst" in flat(printed(result(target=Target()), 1))
    assert report.as_dict(result(target=Target()))["probe"] is None


def test_a_plan_without_decisions_says_so() -> None:
    depth = (TensorAtDepth(0, "y", "n", "Relu", "0:y", Range(0.0, 1.0, 0.5, True)),)
    shown = result(plan=Plan("fp16", float_nodes=100), depth=depth)
    assert "all 100 float nodes in FP16: none needs FP32" in flat(printed(shown))
    assert "Rule" not in printed(shown, verbosity=1)


SPANS = {"x": ((1, 3, 8, 6), (2, 3, 8, 8), (4, 3, 8, 10))}
ENGINE = "--saveEngine=fixed.engine"

COMMANDS = [
    pytest.param(Target(), f"trtexec --onnx=fixed.onnx --stronglyTyped {ENGINE}", id="unknown TensorRT"),
    pytest.param(
        Target("tensorrt", (10, 3)), f"trtexec --onnx=fixed.onnx --stronglyTyped {ENGINE}", id="TensorRT 10"
    ),
    pytest.param(Target("tensorrt", (8, 6)), f"trtexec --onnx=fixed.onnx --fp16 {ENGINE}", id="TensorRT 8.6"),
    pytest.param(Target("tensorrt", (11, 1)), f"trtexec --onnx=fixed.onnx {ENGINE}", id="TensorRT 11.1"),
    pytest.param(Target("tensorrt-rtx", (1, 6)), f"tensorrt_rtx --onnx=fixed.onnx {ENGINE}", id="RTX"),
]


@pytest.mark.parametrize(("target", "command"), COMMANDS)
def test_next_command(target: Target, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is for the machine that deploys: what is installed here does not matter."""
    monkeypatch.setenv("PATH", str(tmp_path))
    done = result(target=target, output=Path("fixed.onnx"))
    assert f"Next     {command}" in printed(done).splitlines(), "on one line, to be copied"


def test_a_script_is_the_next_command() -> None:
    done = result(output=Path("fixed.onnx"), script=Path("my fixed.build.py"))
    assert "Next     python 'my fixed.build.py'" in printed(done).splitlines()
    assert "--stronglyTyped" not in printed(done)
    assert report.as_dict(done)["script"] == "my fixed.build.py"


def test_the_command_for_the_machine_with_the_gpu_is_whole() -> None:
    data = DataSource("3", 3, real=True, path="my data", preprocess="imagenet", spans=SPANS)
    model = Model(STATIC.proto, path=Path("net.onnx"))
    done = result(model=model, data=replace(data, profiled=frozenset({"x"})))
    words = "rewriter verify net.onnx out/fixed.onnx --inputs 'my data' --image-preprocess imagenet "
    words += "--min-shapes=x:1x3x8x6 --opt-shapes=x:2x3x8x8 --max-shapes=x:4x3x8x10"
    assert f"then     {words}" in printed(done).splitlines()
    ran = Verdict((Check("run", True, (), (output(),), summary="on a GPU"),))
    assert "rewriter verify" not in printed(replace(done, verdict=ran)), "it ran here"


def test_shares_of_latency_name_their_source() -> None:
    words = "Latency 107 % of plain FP16's (measured); 44 % of FP32's (estimated, recorded on an H200"
    assert words in flat(printed(result(latency_shares=SHARES)))
    assert latency(SHARES) == "44 % of FP32's (estimated), 107 % of plain FP16's"
    itself = (SHARES[0], replace(SHARES[1], share=1.0))
    assert result(verdict=BUILT, latency_shares=itself).gain.startswith(
        "2.3 times as fast as FP32 (estimated)"
    )


@values
def test_the_profile_of_the_command(
    profiled: set[str], least: dict[str, tuple[int, ...]], shapes: tuple[str, str, str]
) -> None:
    low, usual, high = SPANS["x"]
    spans = {**SPANS, "x": (low if profiled else (2, *low[1:]), usual, high)}
    data = DataSource("data", 3, real=True, spans=spans, profiled=frozenset(profiled), room=Room(least))
    following = next_step(result(model=DYNAMIC, output=Path("fixed.onnx"), data=data))
    words = "--minShapes=x:{} --optShapes=x:{} --maxShapes=x:{}".format(*shapes)
    assert following.build.endswith(words), "z is not dynamic"
    assert (report.PROPOSED in following.remarks) is not bool(profiled)


def test_an_axis_that_was_always_1_stays_1() -> None:
    one = (1, 3, 8, 6)
    data = DataSource("data", 3, real=True, spans={"x": (one, one, one)})
    command = next_step(result(model=DYNAMIC, output=Path("fixed.onnx"), data=data)).build
    assert command.endswith("--maxShapes=x:1x3x8x12")


def test_types_that_a_release_does_not_keep_are_named() -> None:
    done = result(target=Target("tensorrt", (8, 6)), output=Path("fixed.onnx"))
    assert "the builder of tensorrt 8.6 chooses types itself" in flat(printed(done))


def test_unknown_sizes_are_left_for_the_user_and_quoted_for_the_shell() -> None:
    command = next_step(result(model=DYNAMIC, output=Path("a b.onnx"), data=None)).build
    assert "'--onnx=a b.onnx'" in command and "'--minShapes=x:?x3x8x?'" in command


@pytest.mark.parametrize("changes", [{"output": None}, {"verdict": BAD}], ids=["no file", "a failure"])
def test_no_command(changes: dict[str, object]) -> None:
    assert not next_step(result(**changes)).build
    assert "Next" not in printed(result(**changes))


def test_json_holds_the_whole_result() -> None:
    fields = report.as_dict(result())
    assert fields["schema_version"] == 1
    assert fields["versions"]["onnx"]
    assert fields["output"] == "out/fixed.onnx"
    assert fields["input"] is None
    assert fields["passes"][1]["changes"][34] == {"node": "/conv.34/Clip", "what": "Clip became Max and Min"}
    seen = {"low": 0.0, "high": 3e6, "mean_abs": 1e6, "finite": True, "headroom": 2.0, "step": None}
    assert fields["plan"]["fp32"][3]["range"] == seen
    assert fields["checks"][0]["outputs"][0]["passed"] is True
    assert fields["checks"][2]["passed"] is None and fields["verified"] is True
    assert fields["next_command"] == next_step(result()).build
    whole = report.as_dict(result(causes=(CAUSE,), before=(output(),), repairs=["without x: passes"]))
    assert whole["causes"][0]["reach"] == 7e7
    assert whole["before"][0]["name"] == "y"
    assert whole["repairs"] == ["without x: passes"]


def test_json_is_standard_even_with_infinities_and_numpy_numbers(tmp_path: Path) -> None:
    wild = replace(
        output(), relative_l2=float("inf"), max_abs=float(np.float32("nan")), tolerance=np.float64(0.5)
    )
    path = tmp_path / "report.json"
    write_json(report.as_dict(result(verdict=Verdict((Check("emulation", False, (), (wild,)),)))), path)
    fields = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert fields["checks"][0]["outputs"][0]["relative_l2"] == "inf"
    assert fields["checks"][0]["outputs"][0]["max_abs"] == "nan"
    assert fields["checks"][0]["outputs"][0]["tolerance"] == 0.5


def test_outputs_with_parts_can_be_reported() -> None:
    """Boxes in pixels beside scores: each part is an output of the report, named by its slices."""
    text = """
        g (float[1,4,64] x) => (float[1,8,64] y) <float pixels = {640.0}> {
            b = Sigmoid(x) boxes = Mul(b, pixels) t = Tanh(x) scores = Sigmoid(t)
            y = Concat <axis = 1> (boxes, scores) }"""
    result = rewriter.fix(graph(text).proto, build=False)
    whole = json.loads(json.dumps(report.as_dict(result)))
    names = [output["name"] for output in whole["before"]]
    assert names == ["y", "y (rows 4 to 7 of axis 1)"]
    assert [output["name"] for output in whole["checks"][-1]["outputs"]] == names


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
    failed = Check("run", False, (), outputs, ("build 1: crashed",), summary="NOT within 0.005")
    missing = Check("reference", None, summary="the original did not run here")
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
