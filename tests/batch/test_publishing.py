"""Results of a batch: each is published whole, what it replaces goes, and none passes for another's."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from paths import ROOT
from stored import foreign, value
from typer.testing import CliRunner

from rewriter import cli
from rewriter.batch import models
from rewriter.ir.model.files import publish
from rewriter.ir.model.output_files import OWNER, work_folder

QUICK = ("--jobs=1", "--passes=clean-casts", "--precision=fp32", "--no-verify")
STATE = "net.onnx.batch.json"


@pytest.fixture(autouse=True)
def _settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWRITER_CONFIG", "none")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of the children
    monkeypatch.chdir(tmp_path)


def batch(number: float | None, *, code: int = 0) -> str:
    """Fixes a model with external data into `out`; None: a file that is no model."""
    shutil.rmtree("models", ignore_errors=True)
    Path("models").mkdir()
    if number is None:
        Path("models/net.onnx").write_bytes(b"no model")
    else:
        foreign(Path("models/net.onnx"), number, "net.onnx.data")
    done = CliRunner().invoke(cli.app, ["batch", "models", "-o", "out", *QUICK], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.stdout


def names(folder: str = "out") -> list[str]:
    return sorted(file.name for file in Path(folder).iterdir())


def test_a_batch_changes_no_data_that_another_model_names() -> None:
    batch(1)
    shutil.copyfile("out/net.onnx", "out/copy.onnx")
    batch(2)
    assert (value(Path("out/net.onnx")), value(Path("out/copy.onnx"))) == (2, 1)
    Path("out/copy.onnx").unlink()
    batch(3)
    assert len(names()) == 3, "the data of earlier runs is gone"


KILLS = """
import os, signal, sys
renamed = False
def hook(event, arguments):
    global renamed
    changes = event in {"os.rename", "os.remove"} and "net.onnx" in str(arguments[0])
    if changes and renamed is (os.environ["KILLED"] == "after"):
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    renamed = renamed or (event == "os.rename" and str(arguments[1]).endswith("net.onnx"))
if "KILLED" in os.environ and "-c" in sys.orig_argv:
    sys.addaudithook(hook)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="sends POSIX signals")
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_killed_batch_leaves_one_pair_and_the_next_run_its_own(moment: str, tmp_path: Path) -> None:
    """The child that writes is killed with its batch, before or after it replaces the model."""
    batch(1)
    foreign(Path("models/net.onnx"), 2, "net.onnx.data")
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(KILLS)
    path = os.pathsep.join((str(tmp_path / "hook"), str(ROOT)))
    command = [sys.executable, "-m", "rewriter", "batch", "models", "-o", "out", *QUICK]
    environment = {**os.environ, "PYTHONPATH": path, "KILLED": moment}
    assert subprocess.run(command, env=environment, capture_output=True, timeout=120, check=False).returncode
    assert value(Path("out/net.onnx")) == {"before": 1, "after": 2}[moment]
    assert len(names()) > 3, "the killed run left files"
    assert "finished in an earlier run" not in batch(2)
    assert value(Path("out/net.onnx")) == 2
    (data,) = {*names()} - {"net.onnx", STATE}
    assert data.endswith(".data")


def test_the_result_of_a_model_that_became_unreadable_is_set_aside() -> None:
    batch(1)
    text = batch(None, code=1)
    assert "not an ONNX model" in text and "net.onnx.outdated is the result of an earlier model" in text
    assert names() == ["net.onnx.batch.json", "net.onnx.data", "net.onnx.outdated"]
    assert value(Path("out/net.onnx.outdated")) == 1
    batch(2)
    (data,) = {*names()} - {"net.onnx", STATE}
    assert value(Path("out/net.onnx")) == 2 and data == "net.onnx.1.data"


def test_two_batches_at_once_leave_one_result() -> None:
    batch(1)
    command = [sys.executable, "-m", "rewriter", "batch", "models", "-o", "out", "--again", *QUICK]
    both = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(120) for process in both] == [0, 0]
    assert value(Path("out/net.onnx")) == 1
    batch(2)
    assert len(names()) == 3


def test_a_result_of_another_machine_gets_data_of_its_own(tmp_path: Path) -> None:
    foreign(tmp_path / "net.onnx", 1, "net.onnx.data")
    worker = tmp_path / "worker"
    worker.mkdir()
    foreign(worker / "net.onnx", 2, "weights")
    publish(worker / "net.onnx", tmp_path / "net.onnx")
    assert value(tmp_path / "net.onnx") == 2 and (tmp_path / "net.onnx.1.data").is_file()


def test_hidden_folders_hold_no_models(tmp_path: Path) -> None:
    for folder in (".rewriter-batch-x", "nets"):
        (tmp_path / folder).mkdir()
        foreign(tmp_path / folder / "net.onnx", 1, "net.onnx.data")
    assert [entry.name for entry in models.named([tmp_path], tmp_path / "out")] == ["nets/net.onnx"]
    assert models.named([tmp_path / ".rewriter-batch-x"], tmp_path / "out"), "it is named"


@pytest.mark.skipif(sys.platform == "win32", reason="no file can be locked there")
def test_work_folders_of_killed_runs_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("rewriter-killed", "rewriter-of-the-user"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.onnx").write_bytes(b"large")
    (tmp_path / "rewriter-killed" / OWNER).touch()
    code = "from rewriter.ir.model.output_files import work_folder\n"
    code += "with work_folder() as folder: print(folder, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as living:
        assert living.stdout is not None
        other = Path(living.stdout.readline().strip())
        with work_folder() as mine:
            assert {*tmp_path.iterdir()} >= {mine, other, tmp_path / "rewriter-of-the-user"}
            assert not (tmp_path / "rewriter-killed").exists()
        living.kill()
        living.wait()
        assert other.is_dir()
        with work_folder():
            assert not other.exists()


def test_runs_that_start_together_keep_their_work_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None takes another's folder, between its making and its lock, for what a killed run left."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def run(_: int) -> bool:
        with work_folder() as mine:
            return (mine / OWNER).is_file()

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(run, range(800)))
    assert list(tmp_path.iterdir()) == []
