"""docs/troubleshooting.md: a model with each symptom gets the line that the page quotes, and the remedy."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser
from paths import DOCS, MODELS
from typer.testing import CliRunner

from rewriter.cli import app

PAGE = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")

DYNAMIC = """
<ir_version: 8, opset_import: ["" : 17]>
net (float[1, 8] x, float[8, 8] w) => (int32[1, 8] y) {
    a, s, z = DynamicQuantizeLinear(x)
    b, t, u = DynamicQuantizeLinear(w)
    y = MatMulInteger(a, b, z, u)
}
"""

PLUGIN = """
<ir_version: 8, opset_import: ["" : 17, "mine" : 1]>
net (float[1, 8] x) => (float[1, 8] y) { h = Relu(x)  y = mine.Fancy(h) }
"""


def printed(command: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """Exit code and output on one line, without building engines."""
    monkeypatch.setenv("REWRITER_BUILD", "false")
    done = CliRunner().invoke(app, command.split())
    return done.exit_code, " ".join((done.stdout + done.stderr).split())


def quoted(text: str) -> str:
    """A text that the page quotes."""
    assert f"`{text}`" in PAGE, text
    return text


@pytest.mark.parametrize(
    ("name", "inputs", "kind", "line"),
    [
        ("bert", True, "mask", "becomes infinite"),
        ("mismatch", False, "overflow", "exceeds 65504"),
        ("nafnet", True, "unfused-norm", "exceed 65504"),
    ],
)
def test_causes_of_nan_and_of_wrong_numbers_are_found_and_repaired(
    name: str, inputs: bool, kind: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = f" --inputs {MODELS / name}.npz" if inputs else ""
    _, output = printed(f"scan {MODELS / name}.onnx{data}", monkeypatch)
    assert f"{quoted(kind)}" in output
    assert quoted(line) in output
    code, output = printed(f"fix {MODELS / name}.onnx -o {tmp_path}/fixed.onnx{data}", monkeypatch)
    assert code == 0, output


def test_data_that_differs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = np.load(MODELS / "nafnet.npz")["image"]
    np.savez(tmp_path / "theirs.npz", image=image[:, ::-1] / 255)
    code, output = printed(f"compare-inputs {MODELS}/nafnet.npz {tmp_path}/theirs.npz", monkeypatch)
    assert code == 1
    for text in ("BGR", "divided by 255 twice"):
        assert text in output
        assert text in PAGE
    assert printed(f"compare-inputs {MODELS}/nafnet.npz {MODELS}/nafnet.npz", monkeypatch)[0] == 0


def test_a_known_defect_of_a_release_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS / "matmul_clip"
    _, output = printed(f"scan {model}.onnx --inputs {model}.npz --target 10.12", monkeypatch)
    assert quoted("known-defect") in output
    assert "https://" in output


def test_a_model_that_is_worse_elsewhere_is_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, fixed = MODELS / "conv_clip", tmp_path / "fixed.onnx"
    data = f"--inputs {model}.npz"
    _, output = printed(f"scan {model}.onnx {data} --target 10.0.1", monkeypatch)
    assert f"{quoted('known-defect')}: Clip after a convolution" in output
    assert "on sm_89" in output
    assert printed(f"fix {model}.onnx -o {fixed} {data} --target 10.0.1", monkeypatch)[0] == 0
    assert "Clip" not in {node.op_type for node in onnx.load(fixed).graph.node}
    verify = f"verify {model}.onnx {fixed} {data} --report {tmp_path}/here.html"
    assert printed(verify, monkeypatch)[0] == 0


def test_slow_fp32_is_counted_and_can_be_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS / "matmul_clip"
    command = f"fix {model}.onnx -o {tmp_path}/fixed.onnx --inputs {model}.npz"
    _, output = printed(f"{command} --preset accurate", monkeypatch)
    assert "(3 of 4 float nodes in FP32" in output
    assert "--preset trt11-migrate" in PAGE
    code, output = printed(f"{command} --preset trt11-migrate", monkeypatch)
    assert (code, "(0 of " in output) == (0, True)


@pytest.mark.parametrize(
    ("text", "code", "line"),
    [(DYNAMIC, 3, "quantised dynamically"), (PLUGIN, 0, "without the library of its plugin")],
    ids=["quantised dynamically", "a plugin"],
)
def test_what_does_not_build_has_its_exit_code_and_line(
    text: str, code: int, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx.save(parser.parse_model(text), tmp_path / "model.onnx")
    found, output = printed(f"fix {tmp_path}/model.onnx -o {tmp_path}/fixed.onnx", monkeypatch)
    assert found == code
    assert line in output
    assert f"{code}, `{line}`" in PAGE
