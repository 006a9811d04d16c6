"""A model that TensorRT cannot build is distinguished from one that a pass of ours broke."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_lines import flat
from graphs import graph, weighted
from needs import needs_rtx
from typer.testing import CliRunner

import rewriter
from rewriter.cli import app
from rewriter.ir.model import Model
from rewriter.ir.plan import Precision
from rewriter.jobs.fix import stages
from rewriter.jobs.fix.job import FixJob
from rewriter.passes.base import Change, Context, Event
from rewriter.passes.simplify import Simplify

LARGE_TOPK = """
    g (float[2,9000] x) => (float[2,5000] y, int64[2,5000] i) <int64[1] k = {5000}> {
        a = Sqrt(x) y, i = TopK(a, k) }"""
"""TensorRT takes 3840 at most."""

IMAGE = "g (float[1,2,9,9] x) => (float[1,2,9,9] y) { a = Relu(x) y = Sqrt(a) }"


@needs_rtx
def test_a_model_that_does_not_build_as_it_came_has_an_exit_code_of_its_own(tmp_path: Path) -> None:
    path, out, report = (tmp_path / name for name in ("model.onnx", "out.onnx", "report.json"))
    onnx.save(graph(LARGE_TOPK).whole(), path)
    command = ["fix", str(path), "-o", str(out), "--report", str(report)]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 3, shown.output
    assert f"TensorRT cannot build the original model: {path}" in shown.output and "Next" not in shown.output
    found = json.loads(report.read_text())
    assert found["conclusion"]["kind"] == "unbuildable" and found["next_command"] is None
    assert "K exceeds the maximum value allowed (3840)" in found["conclusion"]["limit"]
    assert "named node" not in found["conclusion"]["remedy"], "TensorRT named none"
    again = CliRunner().invoke(app, ["verify", str(path), str(out), "-q"])
    assert again.stdout == f"TensorRT cannot build the original model: {out}\n"


def test_the_remedy_is_of_the_refusal_not_of_a_pass_that_had_another_reason() -> None:
    source = graph("g (int16[1,64] x) => (float[1,64] y) { a = Cast<to = 1>(x) y = Mul(a, a) }").whole()
    data = {"x": np.arange(64, dtype=np.int16)[None] * 500}
    result = rewriter.fix(source, inputs=data, build=False, target="tensorrt-rtx")
    assert any("cannot be scaled" in event.reason for step in result.passes for event in step.refusals)
    assert "with x in INT16" in result.conclusion.limit
    assert result.conclusion.remedy == "use FP32, INT32 or INT64"


SWITCHED = """
    g (INPUT float[2,9000] x) => (float[2,5000] y) <CONSTANT int64 narrow = {8000},
            int64[1] zero = {0}, int64[1] one = {1}, int64[1] k = {5000}> {
        c = Equal (rate, narrow)
        [choice] y = If (c) <
            then_branch = t () => (float[2,5000] s) { s, i = TopK (x, k) },
            else_branch = e () => (float[2,5000] r) { p = Sqrt (x) r = Slice (p, zero, k, one) }>
    }"""


@needs_rtx
def test_an_input_that_selects_a_branch_is_named_and_as_a_constant_the_rest_builds() -> None:
    switched = graph(SWITCHED.replace("INPUT", "int64 rate,").replace("CONSTANT", ""))
    inputs = {"rate": np.array(16000), "x": np.linspace(0, 1, 18000, dtype=np.float32).reshape(2, 9000)}
    end = rewriter.fix(switched.whole(), inputs=inputs).conclusion
    assert end.kind == "unbuildable"
    assert end.remedy.startswith("the input rate selects a branch of choice: make it a constant")
    alone = graph(SWITCHED.replace("INPUT", "").replace("CONSTANT", "int64 rate = {16000},"))
    assert rewriter.fix(alone.whole(), inputs={"x": inputs["x"]}).conclusion.kind != "unbuildable"


@needs_rtx
def test_attention_with_rows_masked_whole_is_lowered_and_builds() -> None:
    """TensorRT-RTX 1.7.1 fails on such a Where in FP32 between a Softmax and a product in FP16."""
    source = weighted(
        """g (float[2,16,64] x, bool[2,1,16,1] pad) => (float[2,16,64] y)
        <float zero = {0.0}, float none = {-inf},
         int64[4] heads = {0, 0, 4, 16}, int64[3] whole = {0, 0, 64}> {
            m = MatMul(x, a) r = Reshape(m, heads) q = Transpose<perm = [0, 2, 1, 3]>(r)
            n = MatMul(x, b) s = Reshape(n, heads) k = Transpose<perm = [0, 2, 3, 1]>(s)
            o = MatMul(x, c) t = Reshape(o, heads) v = Transpose<perm = [0, 2, 1, 3]>(t)
            scores = MatMul(q, k) padded = Where(pad, none, scores) p = Softmax<axis = -1>(padded)
            nan = IsNaN(p) safe = Where(nan, zero, p) h = MatMul(safe, v)
            moved = Transpose<perm = [0, 2, 1, 3]>(h) joined = Reshape(moved, whole) y = Add(x, joined) }""",
        **dict.fromkeys("abc", (64, 64)),
    )
    generator = np.random.default_rng(0)
    pad = (np.arange(16) >= 12).reshape(1, 1, 16, 1).repeat(2, axis=0)
    data = {"x": generator.standard_normal((2, 16, 64)).astype(np.float32), "pad": pad}
    result = rewriter.fix(source, inputs=data)
    assert result.verified and not result.repairs
    assert result.plan is not None and not any(d.rule == "overflow" for d in result.plan.decisions)


class Dilating(Simplify):
    """simplify, with a defect: a pooling that changes nothing, and that TensorRT refuses."""

    name = "simplify"

    def rewrite_model(self, model: Model, context: Context) -> Iterator[Event]:
        node = model.proto.graph.node[-1]
        if node.op_type != "MaxPool":
            last, node.output[0] = node.output[0], "before"
            pool = onnx.helper.make_node("MaxPool", ["before"], [last], kernel_shape=[1, 1], dilations=[2, 2])
            model.proto.graph.node.append(pool)
            yield Change("y", "pooled")


def with_defect(monkeypatch: pytest.MonkeyPatch, times: int = 1) -> None:
    def changed(job: FixJob) -> FixJob:
        steps = (
            [Dilating() for _ in range(times)] if isinstance(s, Simplify) else [s] for s in job.first.steps
        )
        return replace(job, first=replace(job.first, steps=tuple(chain.from_iterable(steps))))

    original = stages.run
    monkeypatch.setattr("rewriter.jobs.fix.api.run", lambda job: original(changed(job)))


IMAGES = {"x": np.ones((1, 2, 9, 9), np.float32)}


@needs_rtx
def test_a_model_that_we_broke_is_our_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    with_defect(monkeypatch)
    result = rewriter.fix(graph(IMAGE).whole(), inputs=IMAGES, repair=False)
    found = result.conclusion
    assert found.kind == "failed"
    assert found.limit == "TensorRT builds the original, but not the fixed file: a pass broke it"
    assert "(simplify, mixed-precision) with `skip`" in found.remedy
    assert [(c.name, c.passed) for c in result.checks][-2:] == [
        ("build", False),
        ("original build", True),
    ]


@needs_rtx
def test_a_pass_that_breaks_the_build_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_defect(monkeypatch)
    result = rewriter.fix(graph(IMAGE).whole(), tmp_path / "out.onnx", inputs=IMAGES)
    assert result.conclusion.kind == "verified" and result.output == tmp_path / "out.onnx"
    assert "refuses the model" in result.repairs[0]
    assert result.repairs[-1] == "without simplify: every check passes"
    assert "simplify" not in result.pipeline and "mixed-precision" in result.pipeline
    assert "MaxPool" not in {node.op_type for node in onnx.load(tmp_path / "out.onnx").graph.node}


@needs_rtx
def test_what_breaks_every_build_gives_the_fp32_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_defect(monkeypatch, times=2)
    result = rewriter.fix(graph(IMAGE).whole(), tmp_path / "out.onnx", inputs=IMAGES)
    assert result.conclusion.kind == "verified" and result.pipeline == ""
    assert result.repairs[-1] == "all of it in FP32 (TF32), unchanged: every check passes"
    assert onnx.load(tmp_path / "out.onnx").graph == graph(IMAGE).whole().graph


RECURRENT = """
    g (float[5,2,4] x, int32[2] lens) => (float[5,1,2,3] y, float[5,1,2,3] z)
    <float[1,9,4] w = {W}, float[1,9,3] r = {R}> {
        y = GRU<hidden_size = 3>(x, w, r, , lens) a = Relu(x)
        z = GRU<hidden_size = 3>(a, w, r, , lens) }"""


def recurrent() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    numbers = np.random.default_rng(0).standard_normal(63).round(3).astype(str).tolist()
    text = RECURRENT.replace("{W}", f"{{{', '.join(numbers[:36])}}}").replace(
        "{R}", f"{{{', '.join(numbers[36:])}}}"
    )
    x = np.random.default_rng(1).standard_normal((5, 2, 4)).astype(np.float32)
    return graph(text).whole(), {"x": x, "lens": np.array([5, 3], np.int32)}


@needs_rtx
@pytest.mark.parametrize(("precision", "kept"), [("fp16", {"0:n"}), ("bf16", {"0:n", "0:y"})])
def test_what_tensorrt_parses_in_fp32_alone_stays_there(precision: Precision, kept: set[str]) -> None:
    source, feeds = recurrent()
    source.graph.node[0].input.pop()
    source.graph.node[2].CopyFrom(onnx.helper.make_node("Transpose", ["a"], ["t"], perm=[1, 2, 0]))
    for op, given, made in (("Unsqueeze", ["t", "axis"], "b"), ("MeanVarianceNormalization", ["b"], "n")):
        source.graph.node.append(onnx.helper.make_node(op, given, [made]))
    source.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0]), "axis"))
    source.graph.output[1].CopyFrom(
        onnx.helper.make_tensor_value_info("n", onnx.TensorProto.FLOAT, [1, 2, 4, 5])
    )
    del source.graph.input[1]
    result = rewriter.fix(source, inputs={"x": feeds["x"]}, precision=precision)
    assert result.verified and not result.repairs
    assert result.plan is not None
    refused = {d.key for d in result.plan.decisions if " in FP32, not in " in d.reason}
    assert refused == kept


@needs_rtx
def test_nodes_that_the_parser_refuses_go_to_fp32_then_their_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The table is switched off: the refusal is TensorRT's own."""
    monkeypatch.setattr("rewriter.hazards.types.refused_in_type", lambda *_: None)
    monkeypatch.setattr("rewriter.verification.build_check.refused_in_model", lambda *_: ())
    source, feeds = recurrent()
    source.graph.node[0].name, source.graph.node[2].name = "first", "second"
    result = rewriter.fix(source, inputs=feeds)
    assert result.verified
    assert result.repairs[-1] == "all GRU in FP32: every check passes"
    assert result.plan is not None and {"0:y", "0:z"} <= result.plan.fp32


CONTRIB = """<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
    g (float[1,4,4] x) => (float[1,4,4] y) { a = Exp(x) [turned] y = com.microsoft.Inverse(a) }"""


@pytest.mark.parametrize("build", ["--build", "--no-build"])
def test_an_operator_without_an_importer_ends_with_its_node_and_a_remedy(build: str, tmp_path: Path) -> None:
    """With an installed parser and without one: `scan` says the same."""
    path, data = tmp_path / "model.onnx", tmp_path / "data.npz"
    onnx.save(onnx.parser.parse_model(CONTRIB), path)
    np.savez(data, x=np.eye(4, dtype=np.float32)[None])
    inputs = ["--inputs", str(data)]
    out = tmp_path / "out.onnx"
    shown = CliRunner().invoke(app, ["fix", str(path), "-o", str(out), *inputs, build, "--strict"])
    assert shown.exit_code == 3 and not out.exists(), shown.output
    text = flat(shown.output)
    assert "node turned (Inverse): " in text and "takes no com.microsoft.Inverse" in text
    assert "export it without ONNX Runtime's optimizer" in text
    found = rewriter.scan(path, inputs=data)
    (finding,) = (one for one in found.findings if one.kind == "refused-operator")
    assert (finding.severity, finding.nodes) == ("error", ("turned",))


@needs_rtx
@pytest.mark.parametrize(("target", "kind"), [(None, "unbuildable"), ("10.13", "verified")])
def test_the_table_decides_for_a_release_that_is_named(target: str | None, kind: str, tmp_path: Path) -> None:
    """TensorRT-RTX, which is asked where none is named, has no plugin for NonZero."""
    source = graph("g (float[4,4] x) => (int64[2,n] y, float[4,4] z) { z = Relu(x) y = NonZero(z) }").whole()
    feeds = {"x": np.eye(4, dtype=np.float32)}
    written = tmp_path / "fixed.onnx"
    assert rewriter.fix(source, written, inputs=feeds, target=target).conclusion.kind == kind
    assert rewriter.verify(source, written, inputs=feeds).passed is (kind == "verified"), (
        "its target is noted"
    )
    findings = rewriter.scan(source, inputs=feeds, target=target or "tensorrt").findings
    assert [one.kind for one in findings] == ["refused-operator"] * (kind == "unbuildable")


SPEAKER = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[b,t,8] x) => (float[b,16] y)
        <int64[1] one = {1}, int64[1] width = {16}, int64 first = {0}, int64 last = {1}> {
        i = Shape(x) b = Gather(i, first) c = Unsqueeze(b, first) d = Concat<axis = 0>(one, c, width)
        z = ConstantOfShape(d) a = Transpose<perm = [1, 0, 2]>(x)
        l, h, e = LSTM<hidden_size = 16>(a, w, r, , , z, z) q = Squeeze(l, one)
        m, k, f = LSTM<hidden_size = 16>(q, v, s, , , z, z)
        n = Concat<axis = 0>(h, k) o = Gather(n, last) y = Relu(o) }"""
"""The states of two LSTMs, as PyTorch exports the end of a speaker encoder."""


@needs_rtx
@pytest.mark.parametrize("preset", ["trt-fp16", "accurate"])
def test_recurrent_layers_build_with_a_profile_that_fixes_batch_and_length(preset: str) -> None:
    source = weighted(SPEAKER, w=(1, 64, 8), r=(1, 64, 16), v=(1, 64, 16), s=(1, 64, 16)).whole()
    feeds = {"x": np.random.default_rng(1).standard_normal((2, 40, 8)).astype(np.float32)}
    shapes = {"x": (2, 40, 8)}
    low = ["a", "l"]  # no search takes the first LSTM
    result = rewriter.fix(
        source,
        inputs=feeds,
        preset=preset,
        lower=low,
        min_shapes=shapes,
        opt_shapes=shapes,
        max_shapes=shapes,
    )
    assert result.verified and result.plan is not None and len(result.plan.fp32) < 2
    assert not result.repairs, "with `accurate`, an FP32 LSTM follows one in FP16"
    assert [c.passed for c in result.checks if c.name == "build"] == [True]


def test_what_a_pass_declines_is_an_error_of_scan_and_the_remedy_of_fix() -> None:
    """Of two DFTs one has a length that is not known: it is what is named, and why no pass replaces it."""
    model = graph(
        "g (float[2,n,1] x, float[2,8,1] z) => (float[2,n,2] y, float[2,8,2] w) { y = DFT(x) w = DFT(z) }",
        opset=20,
    )
    data = [{name: np.ones((2, 8, 1), np.float32) for name in "xz"}]
    refused = [f for f in rewriter.scan(model, inputs=data).findings if f.kind == "refused-operator"]
    assert [(f.nodes, f.severity) for f in refused] == [(("DFT(y)",), "error"), (("DFT(w)",), "warning")]
    assert "length is not known" in refused[0].repair and "`fix` does it" in refused[1].repair
    ending = rewriter.fix(model, inputs=data, build=False, target="tensorrt-rtx 1.7").conclusion
    assert ending.kind == "unbuildable"
    assert "DFT(y)" in ending.limit and "DFT(w)" not in ending.limit
    assert "length is not known" in ending.remedy
