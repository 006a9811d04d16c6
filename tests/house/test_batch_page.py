"""docs/batch.md and action.yml: commands parse, the manifest is read, and the action's script runs."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args
from xml.etree.ElementTree import parse

import numpy as np
import pytest
from graphs import graph
from nightly import NIGHTLY
from paths import ROOT
from typer.testing import CliRunner

from rewriter.batch.models import Ending
from rewriter.cli import app
from rewriter.ir.model import save

PAGE = (ROOT / "docs/batch.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [
    line.strip().removeprefix("- ")
    for _, block in BLOCKS
    for line in block.splitlines()
    if line.strip().removeprefix("- ").startswith("rewriter ")
]
MODEL = "g (float[2] x) => (float[2] y) <float k = {1e5}> { a = Mul(x, k) y = Neg(a) }"


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every model that the page names, and its manifest."""
    folder = tmp_path_factory.mktemp("shelf")
    for name in ("models/a/net", "nets/deep/one", "extra", "resnet", "detectors/b"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        save(graph(MODEL), folder / f"{name}.onnx")
    np.savez(folder / "resnet.npz", x=np.ones(2, np.float32))
    (text,) = (block for language, block in BLOCKS if language == "toml")
    (folder / "models.toml").write_text(text)
    return folder


RUN = [line for line in COMMANDS if "--ray" not in line]
QUICK = [line for line in RUN if "--manifest" in line]


@pytest.mark.parametrize("line", RUN if NIGHTLY else QUICK)
def test_a_command_of_the_page_runs(line: str, shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By day the one with a manifest; those of a cluster run in tests/batch/test_ray.py."""
    monkeypatch.chdir(shelf)
    monkeypatch.setenv("REWRITER_BUILD", "false")
    monkeypatch.setenv("REWRITER_CACHE", str(shelf / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    done = CliRunner().invoke(app, shlex.split(line, comments=True)[1:])
    assert done.exit_code == 0, done.output
    assert list((shelf / "fixed").rglob("*.onnx"))


def test_every_verdict_is_explained() -> None:
    table = " ".join(re.findall(r"^\| (\w[^|]*) \|", PAGE, re.MULTILINE))
    assert [ending for ending in get_args(Ending) if ending not in table] == []


def action() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with pre-commit")
    read: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    return read


def run_action(folder: Path, **given: str) -> subprocess.CompletedProcess[str]:
    """Runs the action's last step in a folder as GitHub does: inputs come as variables."""
    content = action()
    inputs = {name: value.get("default", "") for name, value in content["inputs"].items()} | given
    step = content["runs"]["steps"][-1]
    values = {name: inputs[text.split(".")[1].split()[0]] for name, text in step["env"].items()}
    program = folder / "bin/rewriter"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m rewriter "$@"\n')
    program.chmod(0o755)
    environment = {
        **os.environ,
        **values,
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "REWRITER_CONFIG": "none",
        "GITHUB_OUTPUT": str(folder / "output"),
    }
    shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    return subprocess.run(shell, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "models/deep").mkdir(parents=True)
    for name in ("a", "deep/b c"):
        save(graph(MODEL), tmp_path / f"models/{name}.onnx")
    return tmp_path


def test_the_action_scans(models: Path) -> None:
    done = run_action(models, models="models/**/*.onnx", options="--fail-on warning")
    assert done.returncode == 1, done.stderr
    assert (models / "output").read_text() == "report=rewriter.sarif\n"
    (log,) = json.loads((models / "rewriter.sarif").read_text())["runs"]
    assert len(log["artifacts"]) == 2


def test_the_action_fixes(models: Path) -> None:
    done = run_action(models, command="batch", models="models", options="--no-build --jobs 2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (models / "output").read_text() == "report=rewriter.xml\n"
    assert parse(models / "rewriter.xml").getroot().get("tests") == "2"
    assert (models / "fixed/deep/b c.onnx").is_file()


def test_the_action_takes_names_of_files_for_files(models: Path) -> None:
    """A model that is called like an option, and patterns in options that name files."""
    (models / "models/a.onnx").rename(models / "--plugin-lib=evil.onnx")
    (models / "Mul.txt").touch()
    options = "--no-build --keep-fp32 Mul*"
    done = run_action(models, models="*evil.onnx models", command="batch", options=options)
    assert "--plugin-lib=evil.onnx: --keep-fp32: no node has the name 'Mul*'" in done.stdout
    done = run_action(models, models="*evil.onnx")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_action_knows_two_commands(models: Path) -> None:
    assert run_action(models, command="verify", models="models").returncode == 2
