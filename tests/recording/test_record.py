"""A script is recorded as it is: samples, links, states; what it prints and returns does not change."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import graph
from paths import ROOT
from typer.testing import CliRunner

import rewriter
from rewriter.base.errors import UsageError
from rewriter.cli import app
from rewriter.ir.model import save
from rewriter.jobs.record import record_script
from rewriter.runtime.inputs import read_raw_samples
from rewriter.runtime.recording.record import Recording

ENCODER = """
g (float[1, 4] x, float[1, 4] mean, float[1, 4] fast)
    => (float[1, 4] y, float[1, 4] new_mean, float[1, 4] new_fast) {
    keep = Constant <value = float {0.99}> ()
    share = Constant <value = float {0.01}> ()
    old = Mul (mean, keep)
    new = Mul (x, share)
    new_mean = Add (old, new)
    both = Add (fast, y)
    new_fast = Tanh (both)
    y = Sub (x, new_mean)
}"""

DECODER = """
g (float[1, 4] y, float[1, past, 4] cache, int64[1] at)
    => (float[1, 4] z, float[1, total, 4] new_cache, float[1, 1, 4] part) {
    axes = Constant <value = int64[1] {1}> ()
    part = Unsqueeze (y, axes)
    new_cache = Concat <axis = 1> (cache, part)
    z = ReduceMean <axes = [1], keepdims = 0> (new_cache)
}"""

SCRIPT = """
import sys
from pathlib import Path
from typing import Any
import numpy as np
import onnxruntime as ort
folder, calls = Path(sys.argv[1]), int(sys.argv[2])
encoder = ort.InferenceSession(folder / "encoder" / "model.onnx")
decoder = ort.InferenceSession((folder / "decoder.onnx").read_bytes())
data = np.random.default_rng(0)
mean, fast, ones = np.full((1, 4), 40, np.float32), np.zeros((1, 4), np.float32), np.ones((1, 4), np.float32)
cache, joined = np.zeros((1, 0, 4), np.float32), np.zeros((1, 0, 4), np.float32)
for call in range(calls):
    x = (data.standard_normal((1, 4)) + 40).astype(np.float32)
    y, mean, fast = encoder.run(None, {"x": x, "mean": mean, "fast": fast})
    z, cache, _ = decoder.run(None, {"y": y, "cache": cache, "at": np.array([call])})
    part = decoder.run(["part"], {"y": ones, "cache": joined, "at": np.array([0])})[0] if call < 3 else 0
print(z, cache.shape)
sys.exit(5)
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    folder = tmp_path / "models"
    (folder / "encoder").mkdir(parents=True)
    save(graph(ENCODER), folder / "encoder" / "model.onnx")
    save(graph(DECODER, opset=13), folder / "decoder.onnx")
    (tmp_path / "script.py").write_text(SCRIPT)
    return [sys.executable, str(tmp_path / "script.py"), str(folder), "40"]


def links_of(recording: Recording) -> set[tuple[str, str, str, str, int | None]]:
    return {(link.producer, link.output, link.consumer, link.input, link.axis) for link in recording.links}


def test_a_script_is_recorded_unchanged(command: list[str], tmp_path: Path) -> None:
    plain = subprocess.run(command, capture_output=True, text=True, check=False)
    result = CliRunner().invoke(app, ["record", str(tmp_path / "samples"), "--", *command])
    recording = Recording.read(tmp_path / "samples")
    assert (result.exit_code, recording.exit_code) == (5, 5)
    assert result.stdout == recording.printed == plain.stdout
    assert recording.command == tuple(command)
    assert recording.versions["numpy"] == np.__version__
    assert {file.name: file.calls for file in recording.files} == {"model": 40, "bytes-1": 43}
    assert recording.calls[:4] == (("model", 0), ("bytes-1", 0), ("bytes-1", 1), ("model", 1))


def test_links_are_found_and_none_is_false(command: list[str], tmp_path: Path) -> None:
    recording = record_script(tmp_path / "samples", command)
    assert links_of(recording) == {
        ("model", "new_mean", "model", "mean", None),
        ("model", "new_fast", "model", "fast", None),
        ("model", "y", "bytes-1", "y", None),
        ("bytes-1", "new_cache", "bytes-1", "cache", 1),
    }
    steps = {state.output: state.step for state in recording.states}
    assert steps["new_cache"] is None
    assert 0 < (steps["new_mean"] or 0) < 16 < (steps["new_fast"] or 0)


def test_samples_are_thinned_and_shapes_are_of_all_calls(command: list[str], tmp_path: Path) -> None:
    recording = record_script(tmp_path / "samples", [*command[:-1], "300"])
    file = recording.file("bytes-1")
    numbers = [int(path.stem) for path in sorted((tmp_path / "samples" / file.samples).glob("*.npz"))]
    assert {0, 1, 3, 7, 15, 31, 63, 127, 255, 302} <= set(numbers)
    assert len(numbers) <= 24
    assert file.shapes["cache"][::2] == ((1, 0, 4), (1, 299, 4))
    assert (tmp_path / "samples" / file.model).is_file()
    last = read_raw_samples(tmp_path / "samples" / file.samples)[-1].read()
    assert last["cache"].shape == (1, 299, 4)


def test_a_recording_ends_after_so_many_calls_and_within_its_disk(command: list[str], tmp_path: Path) -> None:
    recording = record_script(tmp_path / "samples", command, calls=7, disk_gib=100 / 2**30)
    assert (len(recording.calls), recording.exit_code) == (7, 0)
    assert "the limit on disk was reached" in recording.notes[0]
    assert sum(1 for _ in (tmp_path / "samples").rglob("*.npz")) < 4


def test_python_code_records_itself(command: list[str], tmp_path: Path) -> None:
    import onnxruntime as ort

    session = ort.InferenceSession(Path(command[2]) / "encoder" / "model.onnx")
    data = np.random.default_rng(0)
    x: dict[str, Any] = {
        name: data.standard_normal((1, 4)).astype(np.float32) for name in ("x", "mean", "fast")
    }
    with rewriter.record(tmp_path / "samples"):
        for _ in range(3):
            _, x["mean"], x["fast"] = session.run(None, x)
    assert len(links_of(Recording.read(tmp_path / "samples"))) == 2
    with pytest.raises(UsageError, match="no model was called"), rewriter.record(tmp_path / "none"):
        pass
    assert not (tmp_path / "none").exists()


def test_what_cannot_be_recorded_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="C\\+\\+") as error:
        record_script(tmp_path / "samples", [sys.executable, "-c", "print(1)"])
    assert "onnxruntime-genai" in str(error.value)
    with pytest.raises(UsageError, match="other files"):
        record_script(ROOT, [sys.executable, "-c", ""])
    with pytest.raises(UsageError, match="cannot be started"):
        record_script(tmp_path / "samples", ["no-such-command"])
