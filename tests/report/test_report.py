"""Reports: what a reader sees at 80 columns, and what a program gets as JSON."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from graphs import graph

from rewriter.base import Change, Refusal, Target
from rewriter.data.source import DataSource
from rewriter.errors import OutputError
from rewriter.figures.outputs import OutputComparison
from rewriter.jobs.fix.result import FixResult
from rewriter.model import write_json
from rewriter.pipeline.driver import PassResult
from rewriter.plan import Decision, Plan, Range
from rewriter.report import fix as report
from rewriter.report import next_step, terminal
from rewriter.report.terminal import grouped, shorten
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
        f"{tensor} exceeds 3.275e+04",
        tensor,
        measured,
    )


def output(name: str = "y", error: float = 7e-4, *, finite: bool = True) -> OutputComparison:
    return OutputComparison(name, error, 0.5, 0.999999, finite, 5e-3)


GOOD = Verdict(
    (
        Check("structure", True, "FP32 result is bit-equal", (output(error=0.0),), seconds=0.2),
        Check("emulation", True, "FP16 emulated: largest error 0.0007", (output(),), seconds=0.4),
        Check("build", None, "no TensorRT is installed"),
    )
)
REACHED = Check("tolerance", True, "the cheapest of 3 plans that reach 0.001")
BAD = Verdict((Check("emulation", False, "FP16 emulated: NOT within", (output(error=0.3, finite=False),)),))


def result(**changes: object) -> FixResult:
    whole = FixResult(
        model=STATIC,
        output=Path("out/fixed.onnx"),
        pipeline="clean-casts,isolate-clip{when=always}",
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


def flat(text: str) -> str:
    return " ".join(text.split())


def test_highlights_group_lines_that_differ_only_in_names() -> None:
    text = flat(printed(result()))
    assert (
        "isolate-clip 35 14 0.2 35 x Clip became Max and Min: /conv.0/Clip, /conv.1/Clip, ... and 33 more"
        in text
    )
    assert "No changes by: clean-casts" in text
    assert "isolate-clip 14 its bounds are computed: /head.0/Clip, /head.1/Clip, ... and 12 more" in text
    assert "overflow 17 ... exceeds 3.275e+04; widest at /block.9/norm[0]/Pow (Pow): [0, 9e+06]" in text
    assert "load 0.1 s, build 3.2 s" in text
    assert "Data: 4 samples from data.npz" in text


def test_many_reasons_are_cut_and_counted() -> None:
    reasons = "abcdefghijkl"
    decisions = tuple(replace(decision(i), reason=f"reason {c}") for i, c in enumerate(reasons))
    refusals = tuple(Refusal("n", f"reason {c}") for c in reasons)
    text = flat(
        printed(result(plan=Plan("fp16", decisions=decisions), passes=[PassResult("p", (), refusals, 0.0)]))
    )
    assert "... and 7 more: -v shows all" in text
    assert "... and 7 more reasons: -v shows all" in text


def test_verbose_lists_every_node_in_full() -> None:
    text = printed(result(), verbosity=1)
    assert "more" not in text
    joined = text.replace("\n", "").replace(" ", "")
    for name in [f"/conv.{i}/Clip" for i in range(35)] + [f"/head.{i}/Clip" for i in range(14)]:
        assert name in joined
    for i in range(17):
        assert f"/block.{i}/norm[0]/Pow(Pow):/block.{i}/Pow_output_0exceeds3.275e+04,itisin[0," in joined


def test_a_single_decision_is_printed_in_full() -> None:
    text = flat(printed(result(plan=Plan("fp16", decisions=(decision(3),), float_nodes=9))))
    assert (
        "overflow 1 /block.3/norm[0]/Pow (Pow): /block.3/Pow_output_0 exceeds 3.275e+04, it is in [0, 3e+06]"
        in text
    )


def test_changes_of_the_model_name_no_node() -> None:
    step = PassResult("upgrade-opset", (Change("model", "opset 13 became 17"),), (), 0.0)
    assert "opset 13 became 17 In FP32" in flat(printed(result(passes=[step])))


NAMES = [
    pytest.param("/a/b: fits", "/a/b: fits", id="a short name stays"),
    pytest.param(
        "/inner/swin/encoder/layers.0/blocks.0/attention/MatMul",
        ".../blocks.0/attention/MatMul",
        id="a long path keeps its last parts",
    ),
    pytest.param("x" * 40, "..." + "x" * 29, id="a long name without a path keeps its end"),
    pytest.param(
        f"see (/very/long/{'y' * 20}/path/MatMul), then", "see (.../path/MatMul), then", id="in a sentence"
    ),
]


@pytest.mark.parametrize(("text", "short"), NAMES)
def test_long_names_are_cut_at_the_front(text: str, short: str) -> None:
    assert shorten(text) == short


GROUPS = [
    pytest.param(["a/b is big", "a/c is big"], ["... is big"], id="paths"),
    pytest.param(["val_12 is big", "val_3_out is big"], ["... is big"], id="numbered values"),
    pytest.param(["10.bias_q: big", "4.bias_q: big"], ["...: big"], id="names that begin with a number"),
    pytest.param(["a/b is big"], ["a/b is big"], id="a lone text keeps its name"),
    pytest.param(["opset 13", "opset 14"], ["opset 13", "opset 14"], id="numbers tell things apart"),
    pytest.param(["f16-f32-f16 goes", "f16-f32-f16 goes"], ["f16-f32-f16 goes"], id="equal texts"),
]


@pytest.mark.parametrize(("texts", "groups"), GROUPS)
def test_texts_are_grouped(texts: list[str], groups: list[str]) -> None:
    assert [text for text, _ in grouped(texts, lambda text: text)] == groups


def test_quiet_is_one_line() -> None:
    assert (
        printed(result(), verbosity=-1)
        == "Fixed and verified: out/fixed.onnx (17 of 100 float nodes in FP32)\n"
    )


@pytest.mark.parametrize("verbosity", [-1, 0, 1])
def test_lines_fit_80_columns_but_for_the_command(verbosity: int) -> None:
    lines = printed(result(output=Path("fixed.onnx")), verbosity).splitlines()
    assert max(len(line) for line in lines if "trtexec" not in line) <= 80


def test_plain_ascii_comes_out_and_no_colour() -> None:
    text = printed(result())
    assert text.isascii()
    assert "\x1b" not in text


def test_names_that_the_terminal_cannot_encode_do_not_stop_the_report() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    report.print_result(result(warnings=["Knoten \N{GREEK SMALL LETTER PI}"]), terminal.console(stream))
    stream.flush()
    assert b"Warning: Knoten ?" in stream.buffer.getvalue()


def test_a_failure_names_the_check_the_output_and_the_file() -> None:
    text = flat(printed(result(verdict=BAD)))
    assert "VERIFICATION FAILED (emulation): out/fixed.onnx" in text
    assert "emulation FAILED" in text
    assert "emulation y 0.3 0.005 0.5 0.999999 FAILED, NaN or infinity" in text


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        pytest.param(
            {"verdict": None}, "Fixed, NOT verified (--no-verify): out/fixed.onnx", id="no verification"
        ),
        pytest.param(
            {"verdict": Verdict((REACHED,))},
            "Fixed, NOT verified (--no-verify): out/fixed.onnx",
            id="a goal that was reached verifies nothing",
        ),
        pytest.param(
            {"verdict": Verdict((replace(REACHED, passed=False),))},
            "VERIFICATION FAILED (tolerance): out/fixed.onnx",
            id="a goal that was not reached",
        ),
        pytest.param(
            {"verdict": Verdict((REACHED, *GOOD.checks))},
            "Fixed and verified: out/fixed.onnx",
            id="a goal and a verification",
        ),
        pytest.param({"output": None}, "Fixed and verified: nothing written", id="a dry run"),
        pytest.param({"plan": None}, "Fixed and verified: out/fixed.onnx\n", id="structure only"),
        pytest.param({"verdict": Verdict(())}, "VERIFICATION FAILED (no check could be made)", id="no check"),
    ],
)
def test_verdict_line(changes: dict[str, object], line: str) -> None:
    assert line in printed(result(**changes), verbosity=-1)


def test_the_origin_of_probe_results_is_printed() -> None:
    recorded = Target("tensorrt-rtx", known_from="recorded of tensorrt-rtx 1.6 on a GPU, not measured here")
    text = flat(printed(result(target=recorded)))
    assert "Target: tensorrt-rtx; probe results: recorded of tensorrt-rtx 1.6" in text
    assert report.as_dict(result(target=recorded))["probe"] == recorded.known_from
    assert "; no probe results, rules assume the worst" in flat(printed(result(target=Target())))
    assert report.as_dict(result(target=Target()))["probe"] is None


def test_random_data_and_warnings_are_printed() -> None:
    text = flat(
        printed(result(data=DataSource("random data", 1, real=False), warnings=["ranges are guesses"]))
    )
    assert "Data: random data" in text
    assert "Warning: ranges are guesses" in text


def test_a_plan_without_decisions_says_so() -> None:
    assert "No node needs FP32: all 100 float nodes are FP16." in printed(
        result(plan=Plan("fp16", float_nodes=100))
    )


SPANS = {"x": ((1, 3, 8, 6), (2, 3, 8, 8), (4, 3, 8, 10))}

COMMANDS = [
    pytest.param(Target(), STATIC, "trtexec --onnx=fixed.onnx --stronglyTyped", id="unknown TensorRT"),
    pytest.param(
        Target("tensorrt", (10, 3)), STATIC, "trtexec --onnx=fixed.onnx --stronglyTyped", id="TensorRT 10"
    ),
    pytest.param(Target("tensorrt", (8, 6)), STATIC, "trtexec --onnx=fixed.onnx --fp16", id="TensorRT 8.6"),
    pytest.param(Target("tensorrt", (11,)), STATIC, "trtexec --onnx=fixed.onnx", id="TensorRT 11"),
    pytest.param(Target("tensorrt", (11, 1)), STATIC, "trtexec --onnx=fixed.onnx", id="TensorRT 11.1"),
    pytest.param(Target("tensorrt-rtx"), STATIC, "tensorrt_rtx --onnx=fixed.onnx", id="RTX"),
    pytest.param(
        Target("tensorrt-rtx"),
        DYNAMIC,
        "tensorrt_rtx --onnx=fixed.onnx --minShapes=x:1x3x8x6 --optShapes=x:2x3x8x8 --maxShapes=x:4x3x8x10",
        id="dynamic inputs alone get the shapes of the samples",
    ),
]


@pytest.mark.parametrize(("target", "model", "command"), COMMANDS)
def test_next_command(target: Target, model: object, command: str) -> None:
    data = DataSource("data", 3, real=True, spans=SPANS)
    done = result(target=target, model=model, output=Path("fixed.onnx"), data=data)
    assert next_step.next_command(done) == command
    assert command in printed(done), "on one line, to be copied"


def test_types_that_a_release_does_not_keep_are_named() -> None:
    done = result(target=Target("tensorrt", (8, 6)), output=Path("fixed.onnx"))
    assert "the builder of tensorrt 8.6 chooses types itself: --weak-typing" in flat(printed(done))


def test_unknown_sizes_are_left_for_the_user_and_quoted_for_the_shell() -> None:
    command = next_step.next_command(result(model=DYNAMIC, output=Path("a b.onnx"), data=None))
    assert command is not None
    assert "'--onnx=a b.onnx'" in command
    assert "'--minShapes=x:?x3x8x?'" in command


def test_no_file_no_command() -> None:
    assert next_step.next_command(result(output=None)) is None
    assert "Next" not in printed(result(output=None))


def test_json_holds_the_whole_result() -> None:
    fields = report.as_dict(result())
    assert fields["schema_version"] == 1
    assert fields["versions"]["onnx"]
    assert fields["output"] == "out/fixed.onnx"
    assert fields["input"] is None
    assert fields["passes"][1]["changes"][34] == {"node": "/conv.34/Clip", "what": "Clip became Max and Min"}
    assert fields["plan"]["fp32"][3]["range"] == {"low": 0.0, "high": 3e6, "mean_abs": 1e6, "finite": True}
    assert fields["checks"][0]["outputs"][0]["passed"] is True
    assert fields["checks"][2]["passed"] is None
    assert fields["verified"] is True


def test_json_is_standard_even_with_infinities_and_numpy_numbers(tmp_path: Path) -> None:
    wild = replace(
        output(), relative_l2=float("inf"), max_abs=float(np.float32("nan")), tolerance=np.float64(0.5)
    )
    path = tmp_path / "report.json"
    write_json(report.as_dict(result(verdict=Verdict((Check("emulation", False, "", (wild,)),)))), path)
    fields = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert fields["checks"][0]["outputs"][0]["relative_l2"] == "inf"
    assert fields["checks"][0]["outputs"][0]["max_abs"] == "nan"
    assert fields["checks"][0]["outputs"][0]["tolerance"] == 0.5


@pytest.mark.parametrize("name", ["missing/report.json", "folder"])
def test_json_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError, match="cannot write the report"):
        write_json(report.as_dict(result()), tmp_path / name)
    assert [path.name for path in tmp_path.rglob("*")] == ["folder"]
