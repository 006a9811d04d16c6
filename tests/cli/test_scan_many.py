"""`rewriter scan` and `hook scan` with several models: one JSON, one SARIF, and no model stops the others."""

import json
from pathlib import Path

import numpy as np
import pytest
from command_lines import invoke
from graphs import graph

from rewriter.ir.model import save

OVERFLOWS = "g (float[2] x) => (float[2] y) <float k = {1e5}> { a = Mul(x, k) y = Neg(a) }"
SOUND = "g (float[2] x) => (float[2] y) { y = Relu(x) }"


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REWRITER_CONFIG", "none")
    for name, body in (("bad", OVERFLOWS), ("good", SOUND)):
        save(graph(body), tmp_path / f"{name}.onnx")
        np.savez(tmp_path / f"{name}.npz", x=np.ones(2, np.float32))
    (tmp_path / "broken.onnx").write_bytes(b"\x08\x07 this is no model")


def code(*words: str) -> int:
    return invoke(*words).exit_code


COMMANDS = [pytest.param(["scan"], id="scan"), pytest.param(["hook", "scan"], id="hook scan")]


@pytest.mark.parametrize("command", COMMANDS)
def test_all_models_share_one_json_and_one_sarif(command: list[str]) -> None:
    assert code(*command, "bad.onnx", "broken.onnx", "good.onnx", "--json=all.json", "--sarif=all.sarif") == 2
    found = json.loads(Path("all.json").read_text())
    assert [(one["input"], one["counts"]["error"] > 0) for one in found["models"]] == [
        ("bad.onnx", True),
        ("good.onnx", False),
    ]
    assert [one["where"] for one in found["unread"]] == ["broken.onnx"]
    assert all(one["data"]["real"] for one in found["models"])  # the samples beside each
    (log,) = json.loads(Path("all.sarif").read_text())["runs"]
    assert [one["location"]["uri"] for one in log["artifacts"]] == ["bad.onnx", "good.onnx"]
    assert log["invocations"][0]["executionSuccessful"] is False


def test_sarif_goes_to_stdout() -> None:
    done = invoke("scan", "good.onnx", "--sarif=-")
    assert json.loads(done.stdout)["version"] == "2.1.0"
    assert not Path("-").exists()


def test_one_error_in_many_fails() -> None:
    assert code("scan", "good.onnx", "bad.onnx", "--fail-on=error") == 1
    assert code("scan", "good.onnx", "good.onnx", "--fail-on=error") == 0


def test_a_page_of_many_is_refused() -> None:
    assert code("scan", "good.onnx", "bad.onnx", "--report=page.html") == 2
