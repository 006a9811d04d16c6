"""A script is recorded as it is: samples, links, states; what it prints and returns does not change."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paths import ROOT
from streaming import streaming_script
from typer.testing import CliRunner

import rewriter
from rewriter.base.errors import OutputError, UsageError
from rewriter.cli import app
from rewriter.jobs.record import record_script
from rewriter.runtime.inputs import read_raw_samples
from rewriter.runtime.recording.record import Recording


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    return streaming_script(tmp_path)


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
    recording = record_script(tmp_path / "samples", [*command[:-1], "130"])
    file = recording.file("bytes-1")
    numbers = [int(path.stem) for path in sorted((tmp_path / "samples" / file.samples).glob("*.npz"))]
    assert {0, 1, 3, 7, 15, 31, 63, 127, 132} <= set(numbers)
    assert len(numbers) <= 24
    assert file.shapes["cache"][::2] == ((1, 0, 4), (1, 129, 4))
    assert (tmp_path / "samples" / file.model).is_file()
    last = read_raw_samples(tmp_path / "samples" / file.samples)[-1].read()
    assert last["cache"].shape == (1, 129, 4)


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
    (file := tmp_path / "file").touch()
    with pytest.raises(OutputError, match="no folder can be made there"):
        record_script(file / "samples", [sys.executable, "-c", "pass"])
    with pytest.raises(UsageError, match="cannot be started"):
        record_script(tmp_path / "samples", ["no-such-command"])


def test_pytest_and_libraries_without_a_version_are_recorded(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "diffusers").mkdir()  # a package without a file has no version
    test = f"import diffusers, runpy, sys\n\ndef test_it():\n    sys.argv = {command[1:]!r}\n"
    text = f"    try:\n        runpy.run_path({command[1]!r})\n    except SystemExit:\n        pass\n"
    (tmp_path / "test_script.py").write_text(test + text)
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path / "test_script.py")]
    recording = record_script(tmp_path / "samples", run)
    assert (recording.exit_code, len(recording.calls)) == (0, 83)
    assert recording.versions["diffusers"] == "unknown"
