"""The commands that pre-commit runs, and the entries of docs/hooks.md with the real pre-commit."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from paths import ROOT
from typer.testing import CliRunner

from rewriter import cli
from rewriter.hooks.fixing import SCOPES, module_of

MODELS = ROOT / "models"


def git(*arguments: str, cwd: Path) -> None:
    who = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *arguments], cwd=cwd, check=True, capture_output=True)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    folder = tmp_path / "repo"
    folder.mkdir()
    git("init", "-q", cwd=folder)
    return folder


def hook(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, ["hook", *map(str, arguments)])
    return done.exit_code, done.output


def copied(name: str, folder: Path) -> Path:
    for suffix in (".onnx", ".npz"):
        shutil.copyfile(MODELS / f"{name}{suffix}", folder / f"{name}{suffix}")
    return folder / f"{name}.onnx"


def test_scan_stops_at_an_error_and_reads_the_others(tmp_path: Path) -> None:
    bad, good = copied("nafnet", tmp_path), copied("resnet", tmp_path)
    code, output = hook("scan", bad, good)
    assert (code, "resnet.onnx in FP16: 0 errors" in output) == (1, True)
    assert hook("scan", good)[0] == 0
    bad.with_suffix(".npz").unlink()  # the samples that show the overflow
    assert hook("scan", bad)[0] == 0


def test_the_repository_s_table_is_in_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text('[tool.rewriter]\nfail-onn = "warning"\n')
    code, output = hook("scan", copied("resnet", tmp_path))
    assert (code, "unknown key 'fail-onn'" in output) == (2, True)


def test_a_file_is_fixed_once_and_its_original_is_kept(tmp_path: Path) -> None:
    path = copied("nafnet", tmp_path)
    before, raw = path.read_bytes(), tmp_path / "nafnet.raw.onnx"
    code, output = hook("fix", path)
    assert (code, "fixed; review it" in output, "original is nafnet.raw.onnx" in output) == (1, True, True)
    assert raw.read_bytes() == before != path.read_bytes()
    written = path.read_bytes()
    for command in ("scan", "fix"):
        code, output = hook(command, path, raw)
        assert code == 0
        assert "already fixed" in output and "the original of a fixed model" in output
    assert path.read_bytes() == written
    path.write_bytes(before)
    code, output = hook("fix", path)
    assert (code, "only copy" in output) == (2, True)
    assert path.read_bytes() == raw.read_bytes() == before


@pytest.mark.parametrize("command", ["scan", "fix"])
def test_files_that_hold_no_model(command: str, tmp_path: Path) -> None:
    broken, pointer = tmp_path / "broken.onnx", tmp_path / "net.onnx"
    broken.write_bytes(b"no model")
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1234\nsize 1000\n")
    code, output = hook(command, broken, pointer)
    assert (code, "broken.onnx" in output, "Git LFS has not fetched it" in output) == (2, True, True)
    assert hook(command, pointer)[0] == 0
    for name, words in ((tmp_path / "no.onnx", "no such file"), (".", "not a file")):
        code, output = hook(command, name)
        assert (code, words in output) == (2, True)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """pre-commit with its cache in the test's folder, and this `rewriter` in front of any other."""
    pytest.importorskip("pre_commit", reason="pre-commit is not installed: pip install '.[dev]'")
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "rewriter"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m rewriter "$@"\n')
    script.chmod(0o755)
    return {
        **os.environ,
        "PRE_COMMIT_HOME": str(tmp_path / "cache"),
        "PATH": f"{script.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }


def pre_commit(*arguments: str, cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pre_commit", *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("text", ["x(", "3", "{}", "[" * 300, "['', 'encoder.norm', 'n']"])
def test_what_others_wrote_about_modules_ends_no_run(text: str) -> None:
    node = onnx.helper.make_node("Relu", ["x"], ["y"], name="/encoder/encoder.norm/Relu")
    onnx.helper.set_model_props(node, {SCOPES: text})  # type: ignore[arg-type]
    assert module_of(node) == "encoder.norm"


@pytest.mark.skipif(os.name == "nt", reason="the script in front of PATH is one of a POSIX shell")
def test_installed_hooks_run_on_a_commit(repo: Path, environment: dict[str, str]) -> None:
    """The entries as docs/hooks.md has them: the fix runs first, then the scan finds nothing."""
    page = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
    (entries,) = re.findall(r"^```yaml\n(repos:.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (repo / ".pre-commit-config.yaml").write_text(entries)
    copied("nafnet", repo)
    git("add", ".", cwd=repo)
    done = pre_commit("run", cwd=repo, env=environment)
    assert (done.returncode, "fixed; review it" in done.stdout) == (1, True), done.stdout + done.stderr
    git("add", ".", cwd=repo)
    assert {path.name for path in repo.glob("*.raw.onnx")} == {"nafnet.raw.onnx"}
    listed = subprocess.run(["git", "ls-files"], cwd=repo, check=True, capture_output=True, text=True).stdout
    assert "nafnet.onnx" in listed and "raw" not in listed
    again = pre_commit("run", cwd=repo, env=environment)
    assert (again.returncode, again.stdout.count("Passed")) == (0, 2), again.stdout


@pytest.mark.skipif(os.name == "nt", reason="the script in front of PATH is one of a POSIX shell")
def test_the_manifest_s_hooks_run(repo: Path, environment: dict[str, str], tmp_path: Path) -> None:
    """The real manifest, with the installed `rewriter` in place of an environment of its own.

    `language: python` would install `rewriter` and all it needs once more, from the network.
    """
    source = tmp_path / "source"
    source.mkdir()
    manifest = (ROOT / ".pre-commit-hooks.yaml").read_text()
    (source / ".pre-commit-hooks.yaml").write_text(manifest.replace("language: python", "language: system"))
    git("init", "-q", cwd=source)
    git("add", ".", cwd=source)
    git("commit", "-q", "-m", "hooks", cwd=source)
    copied("nafnet", repo)
    git("add", ".", cwd=repo)
    done = pre_commit("try-repo", str(source), "rewriter-scan", "--all-files", cwd=repo, env=environment)
    assert (done.returncode, "nafnet.onnx in FP16" in done.stdout) == (1, True), done.stdout + done.stderr
    assert (
        pre_commit("validate-manifest", ".pre-commit-hooks.yaml", cwd=ROOT, env=environment).returncode == 0
    )
