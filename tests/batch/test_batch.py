"""`rewriter batch` on this machine: results, what is skipped, failures, limits, Ctrl-C."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree.ElementTree import parse

import numpy as np
import onnx
import pytest
from graphs import graph, with_weights
from paths import ROOT
from rich.console import Console
from tables import values
from typer.testing import CliRunner, Result

from rewriter import cli
from rewriter.base.errors import UsageError
from rewriter.batch import models
from rewriter.batch.cluster import Cluster, pack, run_task, unpack
from rewriter.batch.machine import Process
from rewriter.batch.models import Entry, Outcome, key_of, model_files
from rewriter.batch.summary import Summary, print_summary
from rewriter.ir.model import save
from rewriter.pipeline.config import Configuration

FAST = ("--no-build", "--accumulation=fp32")
BODIES = {
    "exp": "g (float[2,8] x) => (float[2,8] y) { a = Exp(x) y = Relu(a) }",
    "nets/log": "g (float[2,8] x) => (float[2,8] y) { a = Abs(x) y = Sqrt(a) }",
}
BROKEN = "broken.onnx"


def rewriter(*arguments: str | Path, code: int) -> Result:
    """Runs the command in this process; the models are in their own."""
    done = CliRunner().invoke(cli.app, [str(a) for a in arguments], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done


@pytest.fixture(scope="module", autouse=True)
def _no_configuration() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REWRITER_CONFIG", "none")
        patch.setenv("PYTHONPATH", str(ROOT))  # of the children
        yield


def write_models(folder: Path) -> Path:
    for name in BODIES:
        path = folder / f"{name}.onnx"
        path.parent.mkdir(parents=True, exist_ok=True)
        save(graph(BODIES[name]), path)
    return folder


def results(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*.onnx")}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `models`, one of them broken, and `fixed`, as one job made it, with all reports."""
    folder = tmp_path_factory.mktemp("batch")
    models = write_models(folder / "models")
    (models / BROKEN).write_bytes(b"\x08\x07 this is no model")
    reports = [f"--report={folder / name}" for name in ("sum.json", "sum.xml")]
    done = rewriter("batch", models, "-o", folder / "fixed", "--jobs=1", *FAST, *reports, code=1)
    (folder / "stdout").write_text(done.stdout)
    (folder / "stderr").write_text(done.stderr)
    return folder


def test_one_failure_stops_nothing_and_every_report_says_so(ran: Path) -> None:
    assert set(results(ran / "fixed")) == {f"{name}.onnx" for name in BODIES}
    endings = {one["name"]: one["ending"] for one in json.loads((ran / "sum.json").read_text())["models"]}
    assert endings == {**{f"{name}.onnx": "unproven" for name in BODIES}, BROKEN: "refused"}
    lines = [line.split(": ")[0] for line in (ran / "stderr").read_text().splitlines() if line[0] == "["]
    assert lines == ["[1/3] broken.onnx", "[2/3] exp.onnx", "[3/3] nets/log.onnx"]
    table = (ran / "stdout").read_text()
    assert "2 of 3 models passed" in table and "broken.onnx: " in table
    suite = parse(ran / "sum.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("3", "0", "1")
    assert [part.text.partition(": ")[0] for part in suite.iter("error") if part.text] == [BROKEN]
    assert [float(part.get("time", 0)) > 0 for part in suite.iter("testsuite")] == [True]


def test_a_narrow_terminal_folds_names_and_cuts_no_number(tmp_path: Path) -> None:
    outcomes = (
        Outcome("verified", "verified", 13, 242, error=8.67e-05, seconds=1234.5),
        Outcome("unbuildable", "a Squeeze has no axes", error=4.06e-07, seconds=9.3),
    )
    name = "packages/of-the-detection-team/a-network-with-a-long-name/2026-11/model.fp32.onnx"
    entry = Entry(name, tmp_path / name, tmp_path / "out.onnx")
    out = Console(record=True, width=80, file=io.StringIO())
    print_summary(Summary([(entry, one) for one in outcomes], "1 job", 2.0), out)
    words = out.export_text().split()
    assert {"verified", "8.67e-05", "1234.5", "unbuildable", "4.06e-07"} <= set(words)
    assert "13 of 242" in " ".join(words)


def test_finished_models_are_skipped_and_damaged_results_made_again(ran: Path) -> None:
    before = results(ran / "fixed")
    unchanged = (ran / "fixed/nets/log.onnx").stat().st_mtime_ns
    (ran / "fixed/exp.onnx").write_bytes(before["exp.onnx"][:-1])
    done = rewriter("batch", ran / "models", "-o", ran / "fixed", *FAST, code=1)
    assert "1 finished in an earlier run" in done.stdout
    assert results(ran / "fixed") == before
    assert (ran / "fixed/nets/log.onnx").stat().st_mtime_ns == unchanged


def test_a_manifest_gives_each_model_its_options(ran: Path) -> None:
    """With two jobs, which change no byte."""
    (ran / "models.toml").write_text(
        """
        build = false
        accumulation = "fp32"
        [[model]]
        path = "models/exp.onnx"
        [[model]]
        path = "models/nets/*.onnx"
        keep-fp32-op = ["Sqrt"]
        """
    )
    report = f"--report={ran / 'manifest.json'}"
    rewriter("batch", "--manifest", ran / "models.toml", "-o", ran / "out", "--jobs=2", report, code=0)
    found = {
        one["name"]: one["fp32_nodes"] for one in json.loads((ran / "manifest.json").read_text())["models"]
    }
    assert set(found) == {"models/exp.onnx", "models/nets/log.onnx"}
    assert found["models/nets/log.onnx"] >= 1
    assert (ran / "out/models/exp.onnx").read_bytes() == (ran / "fixed/exp.onnx").read_bytes()


@values
def test_bad_usage(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        save(graph(BODIES["exp"]), tmp_path / folder / "net.onnx")
    (tmp_path / "bad.toml").write_text('[[model]]\npath = "a"\nprecison = "fp16"\n')
    assert message in rewriter("batch", "-o", "out", *arguments, code=2).stderr
    assert not (tmp_path / "out").exists()


def test_a_model_that_needs_more_memory_than_is_allowed_is_refused(tmp_path: Path) -> None:
    save(graph(BODIES["exp"]), tmp_path / "net.onnx")
    done = rewriter("batch", tmp_path / "net.onnx", "-o", tmp_path / "out", "--memory=0.05", *FAST, code=1)
    assert "net.onnx: needs about 0.5 GiB, and `memory` allows less" in done.stdout
    assert not (tmp_path / "out" / "net.onnx").exists()


def process(tmp_path: Path, limit_s: float) -> Process:
    model = save(graph(BODIES["exp"]), tmp_path / "exp.onnx")
    return Process(Entry("exp.onnx", model, tmp_path / "out.onnx"), limit_s)


def test_a_model_past_its_deadline_is_stopped(tmp_path: Path) -> None:
    outcome = process(tmp_path, 0.3).run()
    assert (outcome.ending, outcome.text) == ("timed out", "stopped after 0.3 s: `time-limit` allows more")
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize(
    ("number", "text"),
    [(signal.SIGSEGV, "SIGSEGV"), (signal.SIGKILL, "memory ran out")],
    ids=["crash", "kill"],
)
def test_a_crash_is_a_finding(number: int, text: str, tmp_path: Path) -> None:
    running = process(tmp_path, 60)
    with ThreadPoolExecutor() as threads:
        future = threads.submit(running.run)
        while running.worker is None:
            time.sleep(0.01)
        os.kill(running.worker._process.pid, number)
        outcome = future.result()
    assert outcome.ending == "crashed" and text in outcome.text


def test_ctrl_c_keeps_what_is_finished(tmp_path: Path) -> None:
    models, fixed = write_models(tmp_path / "models"), tmp_path / "fixed"
    order = [sys.executable, "-m", "rewriter", "batch", str(models), "-o", str(fixed), "--jobs=1", *FAST]
    batch = subprocess.Popen(order, stderr=subprocess.PIPE, text=True, process_group=0)
    assert batch.stderr is not None and batch.stderr.readline().startswith("[1/2] exp.onnx: unproven")
    time.sleep(0.3)  # the second model is running
    os.killpg(batch.pid, signal.SIGINT)
    assert batch.wait(60) == 130
    assert "interrupted" in batch.stderr.read()
    batch.stderr.close()
    assert sorted(file.name for file in fixed.rglob("*")) == ["exp.onnx", "exp.onnx.batch.json", *deep(fixed)]
    assert "1 finished" in rewriter("batch", models, "-o", fixed, "--jobs=2", *FAST, code=0).stdout


def deep(fixed: Path) -> list[str]:
    """Folders that were made for results that did not come."""
    return sorted(folder.name for folder in fixed.rglob("*") if folder.is_dir())


def test_a_model_is_packed_with_its_weights(tmp_path: Path) -> None:
    weights = {"w": np.ones((64, 64), np.float32)}
    model = with_weights("g (float[2,64] x, float[64,64] w) => (float[2,64] y) { y = MatMul(x, w) }", weights)
    path = tmp_path / "net.onnx"
    onnx.save(model.whole(), path, save_as_external_data=True, location="net.data", size_threshold=0)
    (tmp_path / "other.txt").write_text("not of the model")
    packed = pack(path.parent, model_files(path))
    assert sorted(packed) == ["net.data", "net.onnx"]
    unpack(packed, tmp_path / "there" / "deep")
    assert {file.name: file.read_bytes() for file in (tmp_path / "there" / "deep").iterdir()} == dict(packed)


def test_a_folder_is_packed_with_its_name_and_all_below(tmp_path: Path) -> None:
    (tmp_path / "data" / "deep").mkdir(parents=True)
    (tmp_path / "data" / "deep" / "a.npz").write_bytes(b"a")
    (tmp_path / "data" / "b.npz").write_bytes(b"b")
    packed = pack(tmp_path, [tmp_path / "data"])
    assert packed == {"data/deep/a.npz": b"a", "data/b.npz": b"b"}
    assert pack(tmp_path / "data", [tmp_path / "data" / "b.npz"]) == {"b.npz": b"b"}
    unpack(packed, tmp_path / "there")
    assert pack(tmp_path / "there", [tmp_path / "there" / "data"]) == packed


def test_a_key_follows_contents_and_options_and_not_names(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.npz", "b.npz", "c.npz")]
    for path, content in zip(paths, (b"1", b"1", b"2"), strict=True):
        path.write_bytes(content)
    model = save(graph("g (float[2] x) => (float[2] y) { y = Exp(x) }"), tmp_path / "net.onnx")

    def key(**options: Any) -> str:
        return key_of(Entry("net.onnx", model, tmp_path / "out.onnx", options))

    assert key(inputs=paths[0]) == key(inputs=paths[1]) != key(inputs=paths[2])
    assert key(plugin_libs=tuple(paths[:2])) != key(plugin_libs=tuple(paths[:1])) != key()
    assert key(opset=18) != key(opset=17)
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for folder, name in zip(folders, ("x.npz", "x.npz", "y.npz"), strict=True):
        folder.mkdir()
        (folder / name).write_bytes(b"a")
    assert key(inputs=folders[0]) == key(inputs=folders[1]) != key(inputs=folders[2]), (
        "names in a folder count"
    )
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"no model")
    assert key_of(Entry("broken.onnx", broken, tmp_path / "out.onnx", {})) != key()


@values
def test_a_manifest_that_makes_no_sense_is_refused(text: str, words: str, tmp_path: Path) -> None:
    save(graph("g (float[2] x) => (float[2] y) { y = Exp(x) }"), tmp_path / "net.onnx")
    path = tmp_path / "models.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=words) as caught:
        models.listed(path, tmp_path / "out")
    assert str(caught.value).startswith(str(path)) and caught.value.hint


def test_options_of_one_model_go_over_those_of_all(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save(graph("g (float[2] x) => (float[2] y) { y = Exp(x) }"), tmp_path / f"{name}.onnx")
    path = tmp_path / "models.toml"
    path.write_text("opset = 17\n[[model]]\npath = 'a.onnx'\nopset = 18\n[[model]]\npath = 'b.onnx'")
    a, b = models.listed(path, tmp_path / "out")
    assert (a.options["opset"], b.options["opset"]) == (18, 17)


def test_a_batch_of_nothing_and_one_over_its_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no models are named"):
        models.entries([], tmp_path / "out", {}, Configuration(()))
    model = save(graph("g (float[2] x) => (float[2] y) { y = Exp(x) }"), tmp_path / "net.onnx")
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "net.onnx").symlink_to(model)
    with pytest.raises(UsageError, match="would replace the model"):
        models.entries([model], linked, {}, Configuration(()))
    (tmp_path / "net.npz").write_bytes(b"")
    (entry,) = models.entries([model], tmp_path / "out", {}, Configuration(()))
    assert (entry.output, entry.options["inputs"]) == (tmp_path / "out" / "net.onnx", tmp_path / "net.npz")
    for options in ({"input_shapes": {"x": (2,)}}, {"input_values": {"x": 2}}):
        (shaped,) = models.entries([model], tmp_path / "out", options, Configuration(()))
        assert "inputs" not in shaped.options, "the user gave shapes or values for random data"


class Ray:
    """Runs a task where it is submitted: what travels to a worker and back is as on a cluster."""

    exceptions = SimpleNamespace(RayError=ConnectionError)

    def init(self, **_: object) -> None:
        """It is there."""

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": 2.0, "memory": 4e9}}]

    def put(self, value: Any) -> Any:
        return value

    def remote(self, task: Any) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=partial(partial, task)))

    def wait(self, references: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return references[:1], references[1:]

    def get(self, reference: Any) -> Any:
        if reference.args[0].name == "lost.onnx":
            raise ConnectionError("the worker died")
        return reference()


def test_a_cluster_gets_all_and_sends_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save(graph("g (float[2] x) => (float[2] y) { y = Exp(x) }"), tmp_path / "net.onnx")
    np.savez(tmp_path / "x.npz", x=np.ones(2, np.float32))
    options = {"inputs": tmp_path / "x.npz", "build": False}
    entries = [Entry(name, model, tmp_path / "out" / name, options) for name in ("net.onnx", "lost.onnx")]
    monkeypatch.setitem(sys.modules, "ray", Ray())
    cluster = Cluster("auto", gpus=0.0, jobs=0, seconds=60.0)
    cluster.start(entries)
    ends = {end[0].name: end[1] for end in cluster.ends if end is not None}
    assert ends["net.onnx"].ending == "unproven" and ends["net.onnx"].files == ("net.onnx",)
    assert (tmp_path / "out" / "net.onnx").is_file()
    assert ends["lost.onnx"].text == "Ray ran it 6 times: the worker died"
    assert run_task(entries[0], 60.0, "another version", [])[0].ending == "refused"
