"""Where a fixed model comes from is in its metadata, as any ONNX library reads it."""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import graph, with_weights
from paths import MODELS
from typer.testing import CliRunner

import rewriter
from rewriter.base.errors import UsageError
from rewriter.cli import app
from rewriter.hazards.analysis import KINDS
from rewriter.ir.graph.editor import TAG
from rewriter.ir.model import load, save, walk_nodes
from rewriter.jobs.fix.provenance import ALREADY_AVOIDED, is_result_of
from rewriter.report.explain import rules, why

HUGE = """
    <ir_version: 9, opset_import: ["" : 17]>
    g (float[4,8] x) => (float[4,4] y)
    <float[8,4] w = {1,2,3,4,5,6,7,8,1,2,3,4,5,6,7,8,1,2,3,4,5,6,7,8,1,2,3,4,5,6,7,8},
     float[8] up = {3e4,3e4,3e4,3e4,3e4,3e4,3e4,3e4}, float down = {3e-5}> {
        a = Mul(x, up) b = Mul(a, up) c = Mul(b, down) d = Mul(c, down) e = MatMul(d, w)
        y = Softmax(e)
    }"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "net.onnx"
    onnx.save(onnx.parser.parse_model(HUGE), path)
    return path


def entries(message: onnx.ModelProto | onnx.NodeProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in message.metadata_props}


def test_the_file_says_where_it_comes_from(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "fixed.onnx"
    result = rewriter.fix(source, output, build=False)
    written = onnx.load(output)
    found = entries(written)
    assert found["rewriter.version"] == f"rewriter {rewriter.__version__}"
    assert found["rewriter.preset"] == "trt-fp16"
    assert found["rewriter.pipeline"] == result.pipeline
    assert found["rewriter.source"] == "net.onnx"
    assert found["rewriter.source.sha256"] == hashlib.sha256(source.read_bytes()).hexdigest()
    assert found["rewriter.verdict"] == result.ending
    assert result.ending.startswith("Emulated on random data, which is no proof, NOT built, ")
    assert found == entries(result.proto)


def test_every_kept_node_has_its_reason_and_every_made_one_its_pass(source: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    result = rewriter.fix(source, save_plan=plan, build=False)
    assert entries(result.proto)["rewriter.plan.sha256"] == hashlib.sha256(plan.read_bytes()).hexdigest()
    assert result.plan is not None and result.plan.fp32
    notes = {node.output[0]: entries(node) for node in walk_nodes(result.proto.graph)}
    kept = {name: note[ALREADY_AVOIDED] for name, note in notes.items() if ALREADY_AVOIDED in note}
    assert len(kept) == len(result.plan.fp32)
    assert kept["b"].startswith("FP32, overflow: ") and "is in [" in kept["b"]
    casts = [node for node in result.proto.graph.node if node.op_type == "Cast"]
    assert casts and all(entries(node)[TAG] == "mixed-precision" for node in casts)


def test_a_failure_is_noted(source: Path, tmp_path: Path) -> None:
    plan = rewriter.fix(source, build=False).plan
    assert plan is not None
    output, lowered = tmp_path / "fixed.onnx", replace(plan, decisions=())
    result = rewriter.fix(source, output, plan=lowered, build=False)
    assert result.verified is False
    assert (
        entries(onnx.load(output))["rewriter.verdict"] == result.ending == "VERIFICATION FAILED (emulation)"
    )


def test_weights_outside_the_file_stay_where_they_are(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    text = "g (float[4,64] x, float[64,64] w) => (float[4,64] y) { y = MatMul(x, w) }"
    model = with_weights(text, {"w": weight}).whole()
    source, output = tmp_path / "net.onnx", tmp_path / "fixed.onnx"
    onnx.save(model, source, save_as_external_data=True, location="net.bin", size_threshold=0)
    rewriter.fix(source, output, build=False)
    both = source.read_bytes() + (tmp_path / "net.bin").read_bytes()
    found = entries(onnx.load(output))
    assert found["rewriter.source.sha256"] == hashlib.sha256(both).hexdigest()
    assert found["rewriter.verdict"].startswith("Emulated on random data, which is no proof, NOT built")
    assert len(list(tmp_path.glob("fixed.onnx*.data*"))) <= 1


def test_a_model_that_nothing_changed_has_no_notes(source: Path) -> None:
    result = rewriter.fix(source, passes="isolate-clip", build=False)
    assert not entries(result.proto)


def test_the_same_command_twice_replaces_its_own_result_and_no_other_file(tmp_path: Path) -> None:
    body = "{ y = Exp(x) }"
    source, output = (
        save(graph(f"g (float[4] x) => (float[4] y) {body}"), tmp_path / "m.onnx"),
        tmp_path / "o.onnx",
    )
    rewriter.fix(source, output, build=False)
    assert is_result_of(output, source)
    other = save(graph("g (float[4] x) => (float[4] y) { y = Tanh(x) }"), tmp_path / "n.onnx")
    assert not is_result_of(output, other) and not is_result_of(other, source)
    assert is_result_of(save(load(source), tmp_path / "copy.onnx"), source), "nothing was changed"
    (tmp_path / "text.onnx").write_text("no model")
    assert not is_result_of(tmp_path / "text.onnx", source)


def test_a_result_that_is_fixed_again_is_called_one(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "fixed.onnx"
    first = rewriter.fix(source, output, build=False)
    assert not [w for w in first.warnings if "a result of `fix` already" in w]
    second = rewriter.fix(output, build=False)
    (warning,) = [w for w in second.warnings if "a result of `fix` already" in w]
    assert "of net.onnx: Emulated on random data" in warning


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(words), env={"COLUMNS": "80"})
    return done.exit_code, done.output


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_has_a_cause_a_picture_and_a_remedy(name: str) -> None:
    found = rewriter.rule(name)
    assert found.cause.endswith(".") and found.remedy and found.picture and found.picture.isascii()
    assert all(len(line) <= 76 for line in found.picture.split("\n"))
    code, text = run("rule", name)
    first, *lines = text.split("\n")
    assert (code, first) == (0, f"{name}: {found.title} ({found.severity})")
    assert found.picture.split("\n")[0] in text and max(map(len, lines)) <= 80


def test_defects_and_rules_that_are_no_hazards_are_explained() -> None:
    defect = rewriter.rule("conv-clip")
    assert defect.cause.startswith("TensorRT 10.0.1") and defect.link.startswith("https://")
    assert rewriter.rule("epilogue").cause.startswith("free: ")
    code, text = run("rule")
    assert code == 0 and [line.split()[0] for line in text.splitlines()] == list(rules())


def test_a_slip_in_a_rule_offers_the_nearest() -> None:
    code, text = run("rule", "overflw")
    assert code == 2 and "did you mean 'overflow'?" in text


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose squares overflow, fixed."""
    path = tmp_path_factory.mktemp("explained") / "fixed.onnx"
    rewriter.fix(MODELS / "mismatch.onnx", path, build=False)
    return path


def test_a_node_has_its_reason_its_neighbours_and_its_rule(fixed: Path) -> None:
    code, text = run("why", "Mul(square)", str(fixed))
    assert code == 0 and text.startswith("Mul(square) (Mul): FP32\nReason   FP32, overflow: ")
    assert "overflow: tensor outside the lower type's range (error)" in text
    found = why("square", onnx.load(fixed))
    assert found == why("Mul(square)", fixed)
    assert found.rule == rewriter.rule("overflow") and "overflow" in found.reason
    assert found.reads and found.feeds and found.reads != found.feeds


def test_a_node_that_a_pass_made_names_it_and_one_without_a_reason_says_so(fixed: Path) -> None:
    text = run("why", "strain/fp16/Cast", str(fixed))[1]
    assert text.startswith("strain/fp16/Cast (Cast): FP16\nReason   none: ")
    assert "Made by  mixed-precision: `rewriter passes show mixed-precision`" in text


def test_what_cannot_be_explained_is_an_error(fixed: Path) -> None:
    with pytest.raises(UsageError, match="no node has the name") as caught:
        why("sqare", fixed)
    assert "Mul(square)" in caught.value.hint
    with pytest.raises(UsageError, match="no notes of `fix`"):
        why("square", MODELS / "mismatch.onnx")
