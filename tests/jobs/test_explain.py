"""`rewriter rule` and `rewriter why`: a cause, a picture and a remedy for a rule, and a reason for a node."""

from pathlib import Path

import onnx
import pytest
from paths import MODELS
from typer.testing import CliRunner

import rewriter
from rewriter.base.errors import UsageError
from rewriter.cli import app
from rewriter.hazards.analysis import KINDS
from rewriter.report.explain import rules, why


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
