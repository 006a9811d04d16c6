"""The table of TensorRT's known defects: which releases it concerns, and where a graph meets them."""

import re
from collections.abc import Collection
from typing import Any

import graphs
import onnx
import pytest
from hazard_rules import analyzed
from needs import needs_rtx
from tables import values

import rewriter
from rewriter.base.errors import SEVERITIES
from rewriter.hazards import target_rules
from rewriter.hazards.analysis import PrecisionRequest
from rewriter.hazards.target_rules import known_defects
from rewriter.hazards.types import no_lower_type
from rewriter.ir.graph import open_graphs
from rewriter.ir.model import load
from rewriter.ir.plan import Precision
from rewriter.target import Target
from rewriter.target.quirks import Quirk, affected, build_arguments, kept, not_repaired, table

SOURCES = ("measured here", "TensorRT-Model-Connect, qwen_vl", "TensorRT-Model-Connect, builder_policy.py")
UNASKED = {"clip-hides-nan", "grid-sample-attention", "fused-attention-sm120"}
"""Rows from threads without a graph to ask."""

BY_ID = {quirk.id: quirk for quirk in table()}


@pytest.mark.parametrize("quirk", table(), ids=lambda q: q.id)
def test_every_row_is_complete(quirk: Quirk) -> None:
    assert BY_ID[quirk.id] is quirk, "no two rows share a name"
    assert re.fullmatch(r"(https://github\.com/\S+/\d+ ?)+", quirk.source) or quirk.source in SOURCES
    assert quirk.chain and quirk.title and quirk.remedy
    first, last = (Target.parse(f"{quirk.library} {text}").version for text in (quirk.first, quirk.last))
    assert not last or last >= first
    assert quirk.severity in SEVERITIES
    known = quirk.case or (not quirk.probe and (quirk.smallest or quirk.id in UNASKED))
    assert known, "a row has a case, or no `probe` and in `smallest` what is known of a graph that shows it"


@pytest.mark.parametrize(("quirk", "target", "expected"), graphs.cases("hazards/releases.txt"))
def test_which_releases_a_defect_concerns(quirk: str, target: str, expected: str) -> None:
    answers = {"yes": True, "no": False, "perhaps": None}
    assert BY_ID[quirk].concerns(Target.parse(target)) is answers[expected]


@values
def test_a_probe_decides_before_the_table(quirk: str, answer: str, expected: bool | None) -> None:
    row = BY_ID[quirk]
    assert row.concerns(Target("tensorrt", (), {row.answer: answer})) is expected
    if expected is not None:
        assert row.concerns(Target("tensorrt-rtx", (1, 6), {row.answer: answer})) is expected


@pytest.mark.parametrize(("low", "expected"), [("bf16", {"error"}), ("fp16", set())])
def test_a_defect_of_one_type_concerns_that_alone(low: Precision, expected: set[str]) -> None:
    text = "g (float[1,1,4,4] x, float[1,1,2,2] w) => (float[1,1,5,5] y) { y = ConvTranspose(x, w) }"
    request = PrecisionRequest(low, target=Target.parse("11.0"))
    found = list(known_defects(analyzed(text, request=request)))
    assert {h.severity for h in found if "ConvTranspose in BF16" in h.reason} == expected


@pytest.mark.parametrize(("text", "quirk", "expected"), graphs.cases("hazards/quirks.txt"))
def test_where_a_graph_meets_a_defect(text: str, quirk: str, expected: str) -> None:
    source = graphs.graph(text)
    graph = open_graphs(source)[0]
    assert " ".join(sorted(n.output[0] for n in affected(graph, BY_ID[quirk]))) == expected


@values
def test_severity_is_that_of_the_release(opset: int, target: str, expected: set[str]) -> None:
    text = "g (float[1,1,4,4] x, float[1,2,2,2] grid) => (float[1,1,2,2] y) { y = GridSample(x, grid) }"
    request = PrecisionRequest(target=Target.parse(target))
    found = list(known_defects(analyzed(text, request=request, opset=opset)))
    assert {h.severity for h in found if "opset 20" in h.reason} == expected


CLIP = """
    g (float[2,2] x) => (float[2,2] y) <float low = {0.0}, float high = {6.0}> {
        a = MatMul(x, x) y = Clip(a, low, high) }"""


def test_a_finding_says_that_it_was_seen() -> None:
    target = Target("tensorrt-rtx", (1, 6), {"matmul-add-clip": "wrong"})
    request = PrecisionRequest(target=target)
    (finding,) = known_defects(analyzed(CLIP, request=request))
    assert finding.reason.endswith("(seen by `rewriter probe` on tensorrt-rtx 1.6)")
    assert finding.severity == "error"


SCORES = """
    g (float[1,2,8,16] q, float[1,2,16,8] k, float[1,2,8,16] v, float[1,2,8,8] b) => (float[1,2,8,16] y) {
        f = Relu(q) j = Relu(k) w = Relu(v)
        m = MatMul(f, j) h = Add(m, b) MORE p = Softmax<axis = -1>(i) y = MatMul(p, w) }"""
ONCE = SCORES.replace("MORE", "").replace("(i)", "(h)")
WINDOWS = """
    g (float[6,4,8] k, float[6,4,8] q, float[6,4,4] p, float[6,4,8] v, float[16,16] w) => (float[3,2,2,16] y)
    <int64[5] heads = {3,2,2,2,8}, int64[4] whole = {3,2,2,16}> {
        e = Relu(k) f = Relu(q) g = Relu(v)
        t = Transpose<perm = [0,2,1]>(e) m = MatMul(f, t) a = Add(m, p) IN
        s = Softmax<axis = -1>(c) OUT o = MatMul(d, g)
        r = Reshape(o, heads) u = Transpose<perm = [0,2,3,1,4]>(r) i = Reshape(u, whole) y = MatMul(i, w) }"""
WIDE = WINDOWS.replace("IN", "").replace("(c)", "(a)").replace("OUT", "").replace("(d", "(s")
ISLAND = (
    WINDOWS.replace("float", "float16")
    .replace("IN", "c = Cast<to = 1>(a)")
    .replace("OUT", "d = Cast<to = 10>(s)")
)
SCALED = """
    g (float[1,48,64] a, float[64,64] u, float[64,64] v) => (float[1,48,64] y) <float c = {0.5}> {
        x = Relu(a) t = Transpose<perm = [0,2,1]>(x) d = Mul(t, c) e = Transpose<perm = [0,2,1]>(d)
        f = MatMul(e, u) g = MatMul(e, v) y = Add(f, g) }"""
TOKENS = """
    g (float[2,4,64,64] p, float[2,4,64,32] v, float[128,128] u, float[128] b, float[128,128] w)
    => (float[2,128,64] y) <int64[3] whole = {2,64,128}> {
        s = Softmax(p) m = MatMul(s, v) t = Transpose<perm = [0,2,1,3]>(m) h = Reshape(t, whole)
        o = MatMul(h, u) r = Relu(o) z = MatMul(r, w) c = Add(z, b) d = Transpose<perm = [0,2,1]>(c)
        y = Relu(d) }"""
FLOAT8 = """
    g (float8e4m3fn[4,4] w, float[4,4] x) => (float[4,4] y) <float s = {1.0}> {
        d = DequantizeLinear(w, s) y = MatMul(x, d) }"""


def fixed(quirk: str, target: str, model: object = None, **options: Any) -> rewriter.FixResult:
    """`fix` of the quirk's own graph for a target that has it, built by TensorRT-RTX."""
    source = model or BY_ID[quirk].case[0].proto(fp32=True)
    return rewriter.fix(source, target=target, engine="emulation", **options)


def types_of(done: rewriter.FixResult, operators: Collection[str]) -> set[str]:
    """The types of the results of the nodes of these operators."""
    source = done.model
    graph = open_graphs(source)[0]
    named = {1: "fp32", 10: "fp16", 16: "bf16"}
    return {named[graph.dtype(n.output[0]) or 0] for n in graph.nodes if n.op_type in operators}


def built(done: rewriter.FixResult) -> bool:
    return [check.passed for check in done.checks if check.name == "build"] == [True]


@needs_rtx
@pytest.mark.parametrize(
    ("quirk", "target", "precision", "body"),
    [
        pytest.param("conv-transpose-bf16", "11.0", "bf16", None, id="ConvTranspose without a BF16 tactic"),
        pytest.param("deformable-attention-bf16", "11.2 sm_120", "bf16", None, id="GridSample in BF16"),
        pytest.param("rotary-attention", "jetpack-6.2", "fp16", None, id="rotary attention"),
        pytest.param("partial-self-attention", "10.13 sm_110", "fp16", None, id="partial self-attention"),
        pytest.param("sparse-mask-attention", "11.2", "fp16", None, id="sparse masks"),
        pytest.param("fused-attention-sm120", "10.16 sm_120", "fp16", ONCE, id="fused attention"),
        pytest.param("transposes-around-scale", "tensorrt-rtx 1.6.1 sm_90", "fp16", SCALED, id="Transposes"),
        pytest.param("gelu-gate-bias", "tensorrt-rtx 1.6.1 sm_90", "fp16", None, id="GEGLU"),
        pytest.param("transpose-after-two-products", "tensorrt-rtx 1.6.1 sm_90", "fp16", TOKENS, id="tokens"),
    ],
)
def test_what_a_defect_forbids_stays_in_fp32(
    quirk: str, target: str, precision: Any, body: str | None
) -> None:
    model = graphs.graph(body).proto if body else None
    plain = {"precision": precision, "preset": "trt11-migrate"}  # without epilogues in FP32
    done = fixed(quirk, target, model, **plain)
    assert types_of(done, BY_ID[quirk].keep) == {"fp32"}
    assert built(done)
    if quirk != "deformable-attention-bf16":  # GridSample's coordinates stay in FP32 anyway
        elsewhere = fixed(quirk, "10.6 sm_80", model, build=False, **plain)
        assert types_of(elsewhere, BY_ID[quirk].keep) == {precision}


def test_of_tokens_that_become_an_image_the_last_bias_alone_stays_in_fp32() -> None:
    row = BY_ID["transpose-after-two-products"]
    graph = open_graphs(load(row.case[0].proto()))[0]
    assert {node.output[0] for node in kept(graph, row)} == {"c"}


@needs_rtx
@pytest.mark.parametrize(("quirk", "target"), graphs.cases("hazards/repaired.txt"))
def test_a_pass_repairs_a_defect_and_the_result_builds(quirk: str, target: str) -> None:
    done = fixed(quirk, target)
    name = BY_ID[quirk].steps.partition("{")[0]
    assert [step.name for step in done.passes if step.changes and step.name == name]
    (cause,) = (one for one in done.causes if one.kind == "known-defect")
    assert str(cause) == f"{BY_ID[quirk].title} ({BY_ID[quirk].releases}): repaired by {name}"
    assert built(done)


def test_a_build_option_repairs_a_defect() -> None:
    model = graphs.graph(FLOAT8, opset=19)
    assert build_arguments(model, Target.parse("11.2")) == ["--builderOptimizationLevel=0"]
    assert build_arguments(model, Target.parse("11.1")) == []
    done = fixed("fp8-tactics", "11.2", model.proto, build=False)
    assert [one.done for one in done.causes] == ["built with --builderOptimizationLevel=0"]


@needs_rtx
def test_a_softmax_that_is_wrong_in_fp32_stays_in_fp16_and_builds() -> None:
    for gpu, types in (("sm_80", {"fp32"}), ("sm_90", {"fp16"})):
        target, passes = f"tensorrt-rtx 1.6.1 {gpu}", "mixed-precision{epilogues=all},clean-casts"
        done = fixed("softmax-of-relative-positions", target, graphs.graph(WIDE).proto, passes=passes)
        assert types_of(done, ["Softmax"]) == types
        assert built(done)


def test_a_users_softmax_in_fp32_is_a_finding_and_becomes_fp16() -> None:
    target = "tensorrt-rtx 1.6.1 sm_90"
    for text, findings in ((ISLAND, 1), (ISLAND.replace("<to = 1>", "<to = 10>"), 0)):
        found = rewriter.scan(graphs.graph(text).proto, target=target).findings
        assert sum("biased scores" in one.reason for one in found) == findings
    done = fixed("softmax-of-relative-positions", target, graphs.graph(ISLAND).proto, build=False)
    assert types_of(done, ["Softmax"]) == {"fp16"}
    assert [one.done for one in done.causes] == ["Softmax in FP16"]


def test_fix_reports_a_defect_that_it_cannot_repair() -> None:
    body = "g (float[4,4] x) => (float[4,4] y) <int64 i = {0}> { a = CumSum(x, i) y = CumSum(a, i) }"
    done = rewriter.fix(graphs.graph(body).proto, target="10.9", engine="emulation", build=False)
    assert any(
        "CumSum nodes with the same axis" in warning and "4551" in warning for warning in done.warnings
    )


def test_an_unknown_gpu_is_a_note_with_the_command_that_asks() -> None:
    request = PrecisionRequest(target=Target.parse("10.16"))
    (finding,) = (h for h in known_defects(analyzed(ONCE, request=request)) if "fused" in h.reason)
    assert finding.severity == "note"
    assert "rewriter probe --ask" in str(finding.repair)
    for target, told in (("10.16", 1), ("10.16 sm_90", 0), ("10.16 sm_120", 0), ("tensorrt", 0)):
        notes = not_repaired(graphs.graph(ONCE), Target.parse(target), onnx.TensorProto.FLOAT16)
        assert sum("fused attention" in one and "probe --ask" in one for one in notes) == told


GRID = """
    g (float[1,1,4,4] x, float[1,2,2,2] grid) => (float[1,1,2,2] z) { y = GridSample(x, grid) z = Mish(y) }"""


def test_what_the_parser_takes_in_fp32_and_fp16_alone_stays_out_of_bf16() -> None:
    request = PrecisionRequest("bf16", target=Target.parse("11.1"))
    found = {h.node.op_type: h.reason for h in no_lower_type(analyzed(GRID, request=request, opset=22))}
    assert found["GridSample"] == ("tensorrt 11.1 takes GridSample in FP32, not in BF16")
    assert "Mish" in found


def test_a_recurrence_with_lengths_says_that_they_keep_it_in_fp32() -> None:
    text = "g (float[4,2,8] x, float[1,16,8] w, float[1,16,16] r, int32[2] n) => (float[4,1,2,16] y)"
    layer = analyzed(text + "{ y = RNN <hidden_size = 16> (x, w, r, , n) }")
    (hazard,) = no_lower_type(layer)
    assert hazard.reason == "tensorrt takes RNN with n in FP32, not in FP16"


def test_a_dla_leaves_operators_to_the_gpu() -> None:
    text = "g (float[1,4,4,4] x) => (float[1,4,4,4] z) { y = Relu(x) e = Erf(y) z = Tanh(e) }"
    request = PrecisionRequest(target=Target.parse("dla"))
    (found,) = target_rules.refused_operators(analyzed(text, request=request))
    assert (found.node.op_type, found.severity) == ("Erf", "note")
