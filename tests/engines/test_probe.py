"""Probes: their models run and build, and their answers are judged, cached, recorded and used."""

import importlib
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import graphs
import numpy as np
import onnx
import pytest
from needs import needs_rtx
from onnx import ModelProto
from typer.testing import CliRunner

import rewriter
from passes.isolate_clip import IsolateClip
from rewriter.base.errors import EngineError
from rewriter.cli import app
from rewriter.hazards.analysis import PrecisionRequest
from rewriter.hazards.planning.planner import make_plan
from rewriter.ir.model import load
from rewriter.passes.base import Context
from rewriter.passes.decompose_group_norm import DecomposeGroupNorm
from rewriter.passes.work_around_convs import WorkAroundConvs
from rewriter.runtime.engines import probing as store
from rewriter.runtime.engines import this_machine
from rewriter.runtime.engines.build import BuildOptions, build
from rewriter.runtime.engines.nvidia_driver import Gpu
from rewriter.runtime.engines.probing import ask, remember
from rewriter.runtime.ranges import measure as measure_ranges
from rewriter.target import Target
from rewriter.target.probes import UNKNOWN, Answer, Answers, Case, Probe, recorded
from rewriter.target.quirks import every_probe, table

PROBES = every_probe()
ALL_CASES = [(probe, case) for probe in PROBES for case in probe.cases]
IDS = [f"{probe.name}: {case.name}" for probe, case in ALL_CASES]
NO_GPU = this_machine.choose().engine is None


def named(name: str) -> Probe:
    return next(probe for probe in PROBES if probe.name == name)


def test_probes_are_complete_and_have_unique_names() -> None:
    assert len(PROBES) >= 10
    assert len({probe.name for probe in PROBES}) == len(PROBES)
    assert all(len({case.name for case in probe.cases}) == len(probe.cases) for probe in PROBES)
    assert all(probe.used and probe.question.endswith("?") for probe in PROBES)


@pytest.mark.parametrize(("probe", "case"), ALL_CASES, ids=IDS)
def test_every_model_is_valid_and_its_data_fits(probe: Probe, case: Case) -> None:
    for model in (case.proto(), case.proto(fp32=True)):
        onnx.checker.check_model(model, full_check=True)
    feeds = {value.name: value.type.tensor_type for value in case.proto().graph.input}
    assert feeds.keys() == case.feeds().keys()
    for name, array in case.feeds().items():
        assert array.dtype == onnx.helper.tensor_dtype_to_np_dtype(feeds[name].elem_type)
    assert not any(np.isnan(array).any() for array in case.values.values() if array.dtype.kind == "f")


ON_THE_CPU = {
    "matmul-accumulation": "fp32",
    "layer-normalization": "fp32",
    "rms-normalization": "fp32",
    "cumsum-twice": "right",
    "reduce-log-sum-exp": "right",
    "relative-position-shift": "right",
    "rotary-attention": "right",
    "sparse-mask-attention": "right",
}


def test_the_cpu_gives_the_known_answers() -> None:
    """ONNX Runtime computes FP16 in FP32, rounds once, and may drop Casts."""
    found = ask("onnxruntime", [named(name) for name in ON_THE_CPU])
    assert found.values == ON_THE_CPU and found.library == "onnxruntime"


def test_every_kind_of_data() -> None:
    data: dict[str, dict[str, Any]] = {
        "a": {"fill": [1.0, 2.0], "at": [["0,1:", [7.0]]]},
        "b": {"uniform": [3.0, 4.0]},
        "w": {"scale": 100.0},
    }
    graph = "(float[2,3] a, float[9] b) => (float[9] y) <float16[999] w1> { y = Neg(b) }"
    values = Case("one", graph, data).values
    assert values["a"].tolist() == [[1, 7, 7], [2, 1, 2]]
    assert 3 <= values["b"].min() < values["b"].max() < 4
    assert values["w1"].dtype == np.float16 and 80 < values["w1"].astype(float).std() < 120
    assert (Case("one", graph, data).values["b"] == values["b"]).all()
    assert (Case("two", graph, data).values["b"] != values["b"]).any()


@needs_rtx
@pytest.mark.parametrize("name", ["conv-clip", "rms-normalization"])
def test_models_build_without_a_gpu(name: str, tmp_path: Path) -> None:
    for case in named(name).cases:
        onnx.save(case.proto(), tmp_path / "model.onnx")
        report = build(tmp_path / "model.onnx", BuildOptions(library="tensorrt_rtx"), timeout_s=120)
        assert report.engine_bytes, report.refusal


PARTIAL = "partial sums of 204800"
JUDGED: dict[str, tuple[str, dict[str, float | str], str]] = {
    "FP16 accumulators err": (
        "matmul-accumulation",
        {"depth 768": 1.05e-3, "depth 3072": 2e-3, "depth 4096": 2.4e-3, PARTIAL: 0},
        "fp16",
    ),
    "FP16 accumulators overflow": (
        "matmul-accumulation",
        {"depth 768": 2e-4, "depth 3072": 2e-4, "depth 4096": 2e-4, PARTIAL: 1},
        "fp16",
    ),
    "FP32 accumulators": (
        "conv-accumulation",
        {"depth 576": 2e-4, "depth 2304": 2e-4, "depth 4608": 3e-4},
        "fp32",
    ),
    "FP32 accumulators of a ConvTranspose": (
        "conv-transpose-accumulation",
        {"depth 576": 2.9e-4, "depth 2304": 2.9e-4, "depth 4608": 2.9e-4},
        "fp32",
    ),
    "FP16 accumulators of a ConvTranspose": (
        "conv-transpose-accumulation",
        {"depth 576": 9e-4, "depth 2304": 1.7e-3, "depth 4608": 2.5e-3},
        "fp16",
    ),
    "a norm that overflows": ("rms-normalization", {"deviation 1000": math.nan}, "fp16"),
    "a lost bound": ("conv-clip", {"float32": 0, "float16": 0.3}, "wrong"),
    "results that are written as FP16 and read as FP32": (
        "cast-round-trip-output",
        {"FP16 product, FP32 bias": 5.64, "FP32 product": 5.64, "Convs": math.inf},
        "wrong",
    ),
    "attention": (
        "attention-islands",
        {"FP16": 139, "FP32 Softmax": 141, "FP32 QK^T and Softmax": 471},
        "softmax",
    ),
    "nothing runs, where that is the symptom": (
        "conv-transpose-bf16",
        {case.name: "no tactic" for case in named("conv-transpose-bf16").cases},
        "wrong",
    ),
    "nothing runs": ("conv-clip", {"float32": "no tactic", "float16": "no tactic"}, UNKNOWN),
    "a case that did not run": ("conv-clip", {"float32": 0, "float16": "it hung"}, UNKNOWN),
}


@pytest.mark.parametrize(("name", "results", "value"), JUDGED.values(), ids=JUDGED.keys())
def test_answers_follow_the_observations(name: str, results: dict[str, float | str], value: str) -> None:
    probe = named(name)
    assert results.keys() == {case.name for case in probe.cases}
    answer = probe.answer(results)
    assert answer.value == value
    assert value in {*probe.values, UNKNOWN}
    assert all(why in answer.problem for why in results.values() if isinstance(why, str))


# -- keeping and recording ----------------------------------------------------------------------
def test_recorded_answers_name_their_source_and_belong_to_existing_probes() -> None:
    for answers in recorded():
        assert answers.recorded and answers.source
        for name, answer in answers.answers.items():
            assert answer.value in {*named(name).values, UNKNOWN}


def test_two_gpus_answered_every_probe_of_their_time() -> None:
    wrong = {"reduce-log-sum-exp", "cast-round-trip-output", "conv-transpose-bf16", "group-norm-unloadable"}
    wrong |= {"softmax-of-relative-positions", "bias-before-square", "transposes-around-scale"}
    wrong |= {"pointwise-conv-1d-gate"}
    answers = {found.gpu.split()[1]: found.values for found in recorded()}
    asked = {probe.name for probe in PROBES}
    assert answers["H100"].keys() < answers["H200"].keys() == asked
    assert {name for name, value in answers["H100"].items() if value == "wrong"} == wrong
    wrong |= {"clip-before-elementwise", "pointwise-conv-heads", "conv-into-wider-image"}
    wrong |= {"group-norm-few-channels", "conv-one-element-scaled", "unary-after-scale", "gelu-gate-bias"}
    wrong |= {"transpose-after-two-products"}
    assert {name for name, value in answers["H200"].items() if value == "wrong"} == wrong


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder, on a machine with a GPU."""
    monkeypatch.setenv("REWRITER_CACHE", str(tmp_path))
    monkeypatch.setattr(this_machine, "gpu", lambda: Gpu("Some GPU", (9, 0), (13, 0)))
    return tmp_path


@pytest.mark.usefixtures("cache")
def test_recorded_answers_apply_only_to_their_library_and_release() -> None:
    known = store.known_target(Target("tensorrt-rtx"))
    assert (known.answers["conv-clip"], known.answers["reduce-log-sum-exp"]) == ("right", "wrong")
    assert store.known_target(Target("tensorrt-rtx", (1, 6))).answers
    assert not store.known_target(Target("tensorrt-rtx", (1, 4))).answers
    assert store.known_target(Target.parse("tensorrt-rtx 1.6 sm_90")).answers == known.answers
    assert not store.known_target(Target.parse("tensorrt-rtx 1.6 sm_120")).answers
    assert known.known_from == f"recorded of {recorded()[0].title}, not measured here"
    assert known.known_from.startswith("recorded of tensorrt-rtx 1.6.1.120 on NVIDIA H")
    other = store.known_target(Target("tensorrt"))
    assert (other.answers, other.known_from) == ({}, "")


MINE = Answers(
    "tensorrt-rtx",
    "1.6.1.120",
    "Some GPU",
    "CUDA 13.0",
    "a test",
    answers={"conv-clip": Answer("wrong", {"e": 0.5})},
)


def test_measured_answers_override_recorded_ones(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert store.measured() is None
    assert rewriter.probe() == rewriter.probe("tensorrt-rtx") == recorded()[0]
    assert (path := remember(MINE)) and path.is_relative_to(cache)
    assert store.measured(Target("tensorrt-rtx", (1, 6))) == rewriter.probe("tensorrt-rtx") == MINE
    here = store.known_target(Target("tensorrt-rtx"))
    assert here.answers == {"conv-clip": "wrong"}
    assert here.known_from == "measured here: tensorrt-rtx 1.6.1.120 on Some GPU, driver CUDA 13.0"
    assert store.measured(Target("tensorrt")) is None
    with pytest.raises(EngineError, match="nothing is recorded of tensorrt, and nothing was measured here"):
        rewriter.probe("tensorrt")
    for other in (Gpu("Another GPU", (9, 0), (13, 0)), Gpu("Some GPU", (9, 0), (12, 8)), None):
        monkeypatch.setattr(this_machine, "gpu", lambda other=other: other)
        assert store.measured() is None


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("text", ['{"schema_version": 1, "library"', '{"schema_version": 0}', "[]"])
def test_a_broken_cache_is_ignored(text: str) -> None:
    path = remember(MINE)
    assert path is not None
    path.write_text(text)
    assert store.measured() is None


# -- use ----------------------------------------------------------------------------------------
CLIPPED = """
    g (float[1,2,8,8] x, float[2,2,3,3] w) => (float[1,2,6,6] y) <float low = {0.0}, float high = {6.0}>
    { c = Conv(x, w) y = Clip(c, low, high) }"""


def answering(library: str = "tensorrt", **answers: str) -> Target:
    return Target(library, (10, 0), {name.replace("_", "-"): value for name, value in answers.items()})


CLIPS = {
    "not asked, a release with the defect": (answering(), True),
    "seen to be right": (answering(conv_clip="right"), False),
    "seen to be wrong, whatever the release": (replace(answering(conv_clip="wrong"), version=(10, 9)), True),
    "the answer about MatMul says nothing": (answering(matmul_add_clip="right"), True),
}


@pytest.mark.parametrize(("target", "isolated"), CLIPS.values(), ids=CLIPS.keys())
def test_clip_is_isolated_only_where_needed(target: Target, isolated: bool) -> None:
    fixed, _ = graphs.apply(IsolateClip(), graphs.graph(CLIPPED), Context(target=target))
    assert ("Clip" not in graphs.ops(fixed)) == isolated


def rules_of(body: str, target: Target) -> list[str]:
    source = graphs.graph(body)
    feeds = {"x": np.full((1, 4096), 40.0, np.float32), "w": np.full((4096, 2), 0.5, np.float32)}
    feeds = {port.name: feeds[port.name] for port in source.signature.inputs}
    plan = make_plan(source, measure_ranges(source, [feeds]), PrecisionRequest(target=target))
    return [decision.rule for decision in plan.decisions]


NORM = """
    g (float[1,4096] x) => (float[1,4096] y) <float[4096] s = {ONES}>
    { y = LayerNormalization<axis = -1>(x, s) }""".replace("ONES", ", ".join(["1.0"] * 4096))


DEEP = """
    g (float[1,4096] x, float[4096,2] w) => (float[1,2] y) <float[4096,1] s = {SIGNS}> {
        v = Mul(w, s) y = MatMul(x, v) }""".replace("SIGNS", ", ".join(["1", "-1"] * 2048))
LOG_SUM = "g (float[1,4096] x) => (float[1,1] y) { y = ReduceLogSumExp<axes = [1]>(x) }"
USES = {
    "a norm": (NORM, "internal-overflow", "layer_normalization", {"": False, "fp32": False, "fp16": True}),
    "sums": (DEEP, "partial-sums", "matmul_accumulation", {"": True, "fp16": True, "fp32": False}),
    "logsumexp": (
        LOG_SUM,
        "internal-overflow",
        "reduce_log_sum_exp",
        {"": True, "wrong": True, "right": False},
    ),
}


@pytest.mark.parametrize(("body", "rule", "probe", "applies"), USES.values(), ids=USES.keys())
def test_rules_follow_answers(body: str, rule: str, probe: str, applies: dict[str, bool]) -> None:
    found = {a: rule in rules_of(body, answering(**({probe: a} if a else {}))) for a in applies}
    assert found == applies


# -- the command --------------------------------------------------------------------------------
def test_the_command_measures_on_the_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import rewriter.runtime.engines.probing as room

    monkeypatch.setattr(
        room, "ask", lambda engine, probes, progress: ask(engine, [named("layer-normalization")])
    )
    written = tmp_path / "answers.json"
    result = CliRunner().invoke(app, ["probe", "--ask", "--engine", "onnxruntime", "--json", str(written)])
    assert (result.exit_code, "Measured on this machine" in result.output) == (0, True)
    assert json.loads(written.read_text())["answers"]["layer-normalization"]["value"] == "fp32"


@pytest.mark.skipif(not NO_GPU, reason="there is a GPU with TensorRT here")
def test_without_a_gpu_nothing_can_be_asked() -> None:
    result = CliRunner().invoke(app, ["probe", "--ask"])
    assert (result.exit_code, "nothing can be measured here" in str(result.output)) == (2, True)


@pytest.mark.usefixtures("cache")
def test_the_command_prints_what_is_recorded(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["probe", "--json", str(tmp_path / "answers.json")])
    assert result.exit_code == 0 and "Recorded answers" in result.output
    assert "Used for: the target tensorrt-rtx, the default of `fix` where it judges" in result.output
    assert json.loads((tmp_path / "answers.json").read_text())["version"] == "1.6.1.120"


@pytest.mark.skipif(NO_GPU, reason="needs a GPU with TensorRT: the probes run there")
def test_on_a_gpu_every_probe_is_answered() -> None:
    engine = this_machine.choose().engine
    assert engine is not None
    assert UNKNOWN not in {answer.value for answer in ask(engine, PROBES).answers.values()}


QUIRKS = {quirk.id: quirk for quirk in table()}
TARGET = Target.parse("tensorrt-rtx 1.6.1")
WRITTEN = re.compile(r"LayerType: correlation.*Outputs: \[ \{[^}]*Dimensions: \[(.*?)\], Strides: \[(.*?)\]")


def log_of(proto: ModelProto) -> list[str]:
    """What the builder says of an engine."""
    rtx: Any = importlib.import_module("tensorrt_rtx")
    lines = list[str]()

    class Logger(rtx.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            rtx.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            lines.extend(text.splitlines())

    logger = Logger()
    builder = rtx.Builder(logger)
    network = builder.create_network(0)
    assert rtx.OnnxParser(network, logger).parse(proto.SerializeToString())
    config = builder.create_builder_config()
    config.profiling_verbosity = rtx.ProfilingVerbosity.DETAILED
    assert builder.build_serialized_network(network, config) is not None
    return lines


def packed(proto: ModelProto) -> list[bool]:
    """For what each Conv writes: True if rows and images (channels last) follow one another without gaps."""
    shown = (found for line in log_of(proto) if (found := WRITTEN.search(line)))
    written = [[[int(n) for n in part.split(",")] for part in found.groups()] for found in shown]
    return [s[2] == d[3] * s[3] and (d[0] == 1 or s[0] == d[2] * s[2]) for d, s in written]


def cases(quirk: str) -> list[Any]:
    return [pytest.param(case, id=case.name) for case in QUIRKS[quirk].case]


@needs_rtx
@pytest.mark.parametrize("case", cases("conv-into-wider-image"))
def test_a_mended_conv_leaves_no_gaps(case: Case) -> None:
    proto = case.proto()
    assert not all(packed(proto)), "this release has no such kernel"
    mended, report = graphs.apply(WorkAroundConvs(), load(proto), Context(target=TARGET))
    assert report.changes
    found = packed(mended.whole())
    assert found and all(found)


@needs_rtx
@pytest.mark.parametrize("case", cases("group-norm-few-channels"))
def test_an_unfolded_group_norm_has_no_kernel_of_its_own(case: Case) -> None:
    proto = case.proto()
    own = re.compile(r"Name: \w*[GI]nor\w*, LayerType")
    assert any(map(own.search, log_of(proto))), "this release has no such kernel"
    unfolded, report = graphs.apply(DecomposeGroupNorm(), load(proto), Context(target=TARGET))
    assert report.changes
    assert not any(map(own.search, log_of(unfolded.whole())))
