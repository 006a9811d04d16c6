"""docs/troubleshooting.md: a model with each symptom gets the line that the page quotes, and the remedy."""

from pathlib import Path

import onnx
import pytest
from command_lines import invoke
from onnx import parser
from paths import DOCS, MODELS
from tables import values

PAGE = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")

DYNAMIC = """
<ir_version: 8, opset_import: ["" : 17]>
net (float[1, 8] x, float[8, 8] w) => (int32[1, 8] y) {
    a, s, z = DynamicQuantizeLinear(x) b, t, u = DynamicQuantizeLinear(w)
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
    done = invoke(*command.split())
    return done.exit_code, " ".join((done.stdout + done.stderr).split())


def quoted(text: str) -> str:
    """A text that the page quotes."""
    assert f"`{text}`" in PAGE, text
    return text


@values
def test_causes_of_nan_and_of_wrong_numbers_are_found_and_repaired(
    name: str, inputs: bool, kind: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = f" --inputs {MODELS / name}.npz" if inputs else ""
    _, output = printed(f"scan {MODELS / name}.onnx{data}", monkeypatch)
    assert f"{quoted(kind)}" in output
    assert quoted(line) in output
    code, output = printed(f"fix {MODELS / name}.onnx -o {tmp_path}/fixed.onnx{data}", monkeypatch)
    assert code == 0, output


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
