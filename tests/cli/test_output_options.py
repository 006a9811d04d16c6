"""`-q`, `-v` and `--json -` of every command that reports: stdout holds what was asked for alone."""

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
from command_lines import invoke
from graphs import graph

from rewriter.ir.model import save
from rewriter.pipeline.options import share_from_text
from rewriter.report import progress as progress_report

SOURCE = "g (float[2,8] x) => (float[2,8] y) { a = Mul(x, x) y = Sqrt(a) }"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    save(graph(SOURCE), tmp_path / "m.onnx")
    for name in "ab":
        np.savez(tmp_path / f"{name}.npz", x=np.ones((2, 8), np.float32))
    return {path.stem: str(path) for path in tmp_path.iterdir()}


def command(name: str, files: dict[str, str]) -> list[str]:
    return {
        "fix": ["fix", files["m"], "--dry-run", "--no-build", "--inputs", files["a"]],
        "scan": ["scan", files["m"], "--inputs", files["a"]],
        "verify": ["verify", files["m"], files["m"], "--engine", "onnxruntime", "--inputs", files["a"]],
        "locate": ["locate", files["m"], files["m"], "--engine", "emulation", "--inputs", files["a"]],
        "compare-inputs": ["compare-inputs", files["a"], files["b"]],
    }[name]


COMMANDS = ["fix", "scan", "verify", "locate", "compare-inputs"]


@pytest.mark.parametrize("name", COMMANDS)
def test_json_has_stdout_for_itself(name: str, files: dict[str, str]) -> None:
    done = invoke(*command(name, files), "--json", "-")
    assert not done.exit_code, done.output
    assert json.loads(done.stdout)["schema_version"] == 1
    assert done.stderr, "the report is not lost"


@pytest.mark.parametrize("name", COMMANDS)
def test_quiet_is_one_line_and_verbose_says_more(name: str, files: dict[str, str]) -> None:
    outputs = [invoke(*command(name, files), *more).stdout for more in (["-q"], [], ["-v"])]
    quiet, usual, verbose = (text.splitlines() for text in outputs)
    assert len(quiet) == 1
    assert usual[0] == verbose[0] == quiet[0], "the verdict comes first"
    assert len(quiet) <= len(usual) <= len(verbose)
    assert len(usual) <= 18  # long paths take a line more


def test_json_of_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = invoke("config", "--json", "-")
    assert json.loads(done.stdout)["options"]["preset"]["value"] == "trt-fp16"
    quiet = invoke("config", "-q").stdout
    assert "preset" not in quiet


SHARES = [("5%", 0.05), ("0.05", 0.05), ("20%", 0.2), ("20x", 19.0), ("1.05x", 0.05), ("0", 0.0)]


@pytest.mark.parametrize(("text", "share"), SHARES)
def test_a_latency_cost(text: str, share: float) -> None:
    assert share_from_text(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["20", "1", "1.5"])
def test_a_latency_cost_that_may_mean_two_things_is_asked_about(text: str, files: dict[str, str]) -> None:
    done = invoke("fix", files["m"], "--dry-run", "--max-latency-cost", text)
    assert done.exit_code == 2
    assert f"{text}% for that much more latency" in done.stderr
    assert f"{text}x for that many times of it" in done.stderr


def test_a_long_job_shows_that_it_is_alive_in_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_report, "BEAT_SECONDS", 0.05)
    with progress_report.progress(shown=True) as shown:
        shown("probing with 80 models", 3, 80)
        deadline, printed = time.monotonic() + 60, ""
        while not printed and time.monotonic() < deadline:
            time.sleep(0.02)
            printed = capsys.readouterr().err
    assert re.match(r"\d+ s: probing with 80 models, 3 of 80", printed)
