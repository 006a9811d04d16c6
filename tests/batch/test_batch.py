"""`rewriter batch` on this machine: results, what is skipped, failures, limits, Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from xml.etree.ElementTree import parse

import pytest
from graphs import graph
from paths import ROOT
from rich.console import Console
from typer.testing import CliRunner, Result

from rewriter import cli
from rewriter.batch.child import Child, fix_order
from rewriter.batch.models import Entry
from rewriter.batch.state import Outcome, Record, key_of
from rewriter.batch.summary import Summary, print_summary
from rewriter.ir.model import save

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


def write_models(folder: Path, names: tuple[str, ...] = tuple(BODIES)) -> Path:
    for name in names:
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
    reports = [f"--report={folder / name}" for name in ("sum.html", "sum.json", "sum.xml")]
    done = rewriter("batch", models, "-o", folder / "fixed", "--jobs=1", *FAST, *reports, code=1)
    (folder / "stdout").write_text(done.stdout)
    (folder / "stderr").write_text(done.stderr)
    return folder


def test_one_failure_stops_nothing(ran: Path) -> None:
    assert set(results(ran / "fixed")) == {f"{name}.onnx" for name in BODIES}
    endings = {one["name"]: one["ending"] for one in json.loads((ran / "sum.json").read_text())["models"]}
    assert endings == {**{f"{name}.onnx": "verified" for name in BODIES}, BROKEN: "refused"}


def test_lines_and_table(ran: Path) -> None:
    assert [line.split(": ")[0] for line in (ran / "stderr").read_text().splitlines()] == [
        "[1/3] broken.onnx",
        "[2/3] exp.onnx",
        "[3/3] nets/log.onnx",
    ]
    table = (ran / "stdout").read_text()
    assert "2 of 3 models passed" in table
    assert "broken.onnx: " in table


def test_a_narrow_terminal_folds_names_and_cuts_no_number(tmp_path: Path) -> None:
    outcomes = (
        Outcome("verified", "verified", 13, 242, error=8.67e-05, seconds=1234.5, peak_bytes=3 * 2**30),
        Outcome("unbuildable", "a Squeeze has no axes", error=4.06e-07, seconds=9.3, all_fp32=True),
    )
    name = "packages/of-the-detection-team/a-network-with-a-long-name/2026-11/model.fp32.onnx"
    entry = Entry(name, tmp_path / name, tmp_path / "out.onnx")
    out = Console(record=True, width=80, file=io.StringIO())
    print_summary(Summary([Record(entry, one) for one in outcomes], (), "1 job", 2.0), out)
    words = out.export_text().split()
    assert {"verified", "8.67e-05", "1234.5", "3.0", "unbuildable", "all", "4.06e-07"} <= set(words)
    assert "13 of 242" in " ".join(words)


def test_reports(ran: Path) -> None:
    suite = parse(ran / "sum.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("3", "0", "1")
    assert [case.get("name") for case in suite.iter("testcase") if case.find("error") is not None] == [BROKEN]
    page = (ran / "sum.html").read_text()
    assert "2 of 3 models passed" in page
    assert "nets/log.onnx" in page


def test_two_jobs_write_the_same_bytes(ran: Path) -> None:
    rewriter("batch", ran / "models", "-o", ran / "again", "--jobs=2", *FAST, code=1)
    assert results(ran / "again") == results(ran / "fixed")


def test_finished_models_are_skipped(ran: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in (ran / "fixed").rglob("*.onnx")}
    done = rewriter("batch", ran / "models", "-o", ran / "fixed", *FAST, code=1)
    assert "2 finished in an earlier run" in done.stdout
    assert before == {file: file.stat().st_mtime_ns for file in (ran / "fixed").rglob("*.onnx")}


def test_a_damaged_result_is_made_again(ran: Path) -> None:
    result, model = ran / "fixed/exp.onnx", ran / "models/exp.onnx"
    good = result.read_bytes()
    result.write_bytes(good[:-1])
    rewriter("batch", model, "-o", ran / "fixed", *FAST, code=0)
    assert result.read_bytes() == good


def test_no_samples_beside_a_model_is_another_key(tmp_path: Path) -> None:
    model, data = save(graph(BODIES["exp"]), tmp_path / "exp.onnx"), tmp_path / "data.npz"
    data.write_bytes(b"one")
    one = Entry("exp.onnx", model, tmp_path / "out.onnx", {"inputs": data, "tolerance": 1e-3})
    first = key_of(one)
    data.write_bytes(b"two")
    second = key_of(one)
    other = key_of(Entry("exp.onnx", model, tmp_path / "out.onnx", {"inputs": data, "tolerance": 1e-2}))
    save(graph(BODIES["nets/log"]), model)
    assert len({first, second, other, key_of(one)}) == 4


def test_a_manifest_gives_each_model_its_options(tmp_path: Path) -> None:
    write_models(tmp_path, ("exp", "nets/log"))
    manifest = tmp_path / "models.toml"
    manifest.write_text(
        """
        build = false
        [[model]]
        path = "exp.onnx"
        [[model]]
        path = "nets/*.onnx"
        keep-fp32-op = ["Sqrt"]
        """
    )
    report = tmp_path / "sum.json"
    rewriter("batch", "--manifest", manifest, "-o", tmp_path / "out", f"--report={report}", code=0)
    found = {one["name"]: one["fp32_nodes"] for one in json.loads(report.read_text())["models"]}
    assert set(found) == {"exp.onnx", "nets/log.onnx"}
    assert found["nets/log.onnx"] >= 1


WRONG = [
    pytest.param(["nowhere"], "no model is there", id="a folder that is not there"),
    pytest.param(["a/net.onnx", "b/net.onnx"], "has the same name", id="two results of one name"),
    pytest.param(["a", "--verify-on=L4"], "it needs a Ray cluster", id="GPU types without a cluster"),
    pytest.param(["a", "--report=summary.pdf"], ".html, .htm, .json, .xml", id="a report of no known kind"),
    pytest.param(["a", "--manifest=bad.toml"], "unknown key 'precison'", id="a manifest with a misspelt key"),
    pytest.param(["a", "--opset=99"], "--opset: it cannot be '99'", id="an option that makes no sense"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_bad_usage_starts_nothing(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        save(graph(BODIES["exp"]), tmp_path / folder / "net.onnx")
    (tmp_path / "bad.toml").write_text('[[model]]\npath = "a"\nprecison = "fp16"\n')
    assert message in rewriter("batch", *arguments, "-o", "out", code=2).stderr
    assert not (tmp_path / "out").exists()


def running(tmp_path: Path, limit_s: float) -> Child:
    model = save(graph(BODIES["exp"]), tmp_path / "exp.onnx")
    return Child(fix_order(model, tmp_path / "out.onnx", {}, limit_s), tmp_path)


def ended(child: Child) -> Outcome:
    outcome = child.wait()
    with pytest.raises(ProcessLookupError):  # nothing of its group is left
        os.killpg(child.process.pid, 0)
    return outcome


def test_a_model_past_its_deadline_is_stopped(tmp_path: Path) -> None:
    outcome = ended(running(tmp_path, 0.3))
    assert (outcome.ending, outcome.text) == ("timed out", "stopped after 0.3 s: `time-limit` allows more")
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize(
    ("number", "text"),
    [(signal.SIGSEGV, "signal 11"), (signal.SIGKILL, "memory ran out")],
    ids=["crash", "kill"],
)
def test_a_crash_is_a_finding(number: int, text: str, tmp_path: Path) -> None:
    child = running(tmp_path, 60)
    os.kill(child.process.pid, number)
    outcome = ended(child)
    assert outcome.ending == "crashed"
    assert text in outcome.text


def test_ctrl_c_keeps_what_is_finished(tmp_path: Path) -> None:
    models, fixed = write_models(tmp_path / "models"), tmp_path / "fixed"
    order = [sys.executable, "-m", "rewriter", "batch", str(models), "-o", str(fixed), "--jobs=1", *FAST]
    batch = subprocess.Popen(order, stderr=subprocess.PIPE, text=True, process_group=0)
    assert batch.stderr is not None
    assert batch.stderr.readline().startswith("[1/2] exp.onnx: verified")
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


def test_ranges_are_kept_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWRITER_CACHE", str(tmp_path / "cache"))
    model = save(graph(BODIES["exp"]), tmp_path / "exp.onnx")
    command = ("batch", model, "-o", tmp_path / "out", *FAST)
    rewriter(*command, code=0)
    (kept,) = (tmp_path / "cache/ranges").iterdir()
    written = kept.stat().st_mtime_ns
    rewriter(*command, "--keep-fp32-op=Exp", code=0)
    assert list((tmp_path / "cache/ranges").iterdir()) == [kept]
    assert kept.stat().st_mtime_ns == written
