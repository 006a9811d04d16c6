"""The pre-commit hooks with the real pre-commit, and `rewriter hook install` on files that people have."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from paths import ROOT
from typer.testing import CliRunner, Result

from rewriter import cli
from rewriter.hooks.install import HOOKS, TABLE, apply, edits, repository
from rewriter.ir.errors import UsageError

MODELS = ROOT / "models"

OTHERS = """\
# our checks
repos:
  - repo: https://github.com/astral-sh/ruff-pre-commit  # fast
    rev: v0.9.0
    hooks:
      - id: ruff
"""
LOCAL = """\
  - repo: local
    hooks:
    - id: rewriter-scan
      name: rewriter scan
      entry: rewriter hook scan
      language: system
      files: \\.onnx$
      require_serial: true
"""
FLUSH = LOCAL.replace("\n  ", "\n").removeprefix("  ")


def git(*arguments: str, cwd: Path) -> None:
    who = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *arguments], cwd=cwd, check=True, capture_output=True)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    folder = tmp_path / "repo"
    folder.mkdir()
    git("init", "-q", cwd=folder)
    return folder


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


META = "repos:\n- repo: meta\n  hooks:\n  - id: identity\n"
CI = "\n# the end\nci:\n  skip: [ruff]\n"
CONFIGURATIONS = [
    pytest.param(None, "repos:\n" + FLUSH, id="no file"),
    pytest.param("", "repos:\n" + FLUSH, id="an empty file"),
    pytest.param(OTHERS, OTHERS + LOCAL, id="indented items"),
    pytest.param(META, META + FLUSH, id="items at the margin"),
    pytest.param(
        "repos: []  # none yet\nfail_fast: true\n",
        "repos:  # none yet\n" + FLUSH + "fail_fast: true\n",
        id="an empty list",
    ),
    pytest.param(OTHERS + CI, OTHERS + LOCAL + CI, id="something behind"),
    pytest.param("fail_fast: true", "fail_fast: true\n\nrepos:\n" + FLUSH, id="no repos"),
]
REFUSED = [
    pytest.param(
        ".pre-commit-config.yaml", "repos: [{repo: meta}]\n", "in brackets", id="a list in brackets"
    ),
    pytest.param("pyproject.toml", "[project\n", "it is not TOML", id="broken TOML"),
]


class TestInstall:
    @pytest.mark.parametrize(("before", "after"), CONFIGURATIONS)
    def test_the_entry_is_added_and_nothing_else(self, before: str | None, after: str, repo: Path) -> None:
        path = repo / ".pre-commit-config.yaml"
        if before is not None:
            path.write_text(before)
        apply(edits(repo))
        assert path.read_text() == after
        assert edits(repo) == []
        validate = pytest.importorskip("pre_commit.clientlib", reason="pre-commit is not installed")
        validate.load_config(path)

    def test_an_existing_table_is_unchanged(self, repo: Path) -> None:
        text = '[project]\nname = "x"  # ours\n\n[tool.rewriter]\npreset = "trt-bf16"\n'
        (repo / "pyproject.toml").write_text(text)
        apply(edits(repo))
        assert (repo / "pyproject.toml").read_text() == text

    def test_the_table_goes_to_the_end(self, repo: Path) -> None:
        text = '[project]\nname = "x"  # ours'
        (repo / "pyproject.toml").write_text(text)
        apply(edits(repo))
        written = (repo / "pyproject.toml").read_text()
        assert written == f"{text}\n\n{TABLE}"
        assert tomllib.loads(written)["tool"]["rewriter"] == {"preset": "trt-fp16"}

    def test_windows_line_endings_are_kept(self, repo: Path) -> None:
        path = repo / ".pre-commit-config.yaml"
        path.write_bytes(OTHERS.replace("\n", "\r\n").encode())
        apply(edits(repo))
        assert path.read_bytes() == (OTHERS + LOCAL).replace("\n", "\r\n").encode()

    def test_both_hooks_from_a_repository(self, repo: Path) -> None:
        apply(edits(repo, HOOKS, url="https://example.com/rewriter", revision="v1"))
        assert (repo / ".pre-commit-config.yaml").read_text() == (
            "repos:\n- repo: https://example.com/rewriter\n  rev: v1\n  hooks:\n"
            "  - id: rewriter-fix\n  - id: rewriter-scan\n"
        )

    @pytest.mark.parametrize("before", [None, OTHERS, OTHERS + CI, META])
    def test_a_fix_comes_before_the_scan_that_is_there(self, before: str | None, repo: Path) -> None:
        path = repo / ".pre-commit-config.yaml"
        if before is not None:
            path.write_text(before)
        apply(edits(repo))
        apply(edits(repo, HOOKS))
        text = path.read_text()
        assert text.index("id: rewriter-fix") < text.index("id: rewriter-scan")
        assert all(line in text for line in (before or "").splitlines())
        assert edits(repo, HOOKS) == []
        validate = pytest.importorskip("pre_commit.clientlib", reason="pre-commit is not installed")
        validate.load_config(path)

    @pytest.mark.parametrize(("name", "text", "message"), REFUSED)
    def test_files_that_cannot_be_edited_are_unchanged(
        self, name: str, text: str, message: str, repo: Path
    ) -> None:
        (repo / name).write_text(text)
        with pytest.raises(UsageError, match=message):
            edits(repo)
        assert [path.name for path in repo.iterdir() if path.name != ".git"] == [name]

    def test_a_url_needs_a_revision(self, repo: Path) -> None:
        with pytest.raises(UsageError, match="needs a revision"):
            edits(repo, url="https://example.com/rewriter")

    def test_the_command_shows_the_diff(self, repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (repo / "src").mkdir()
        monkeypatch.chdir(repo / "src")
        dry = run("hook", "install", "--dry-run")
        assert dry.exit_code == 0
        assert [path.name for path in repo.iterdir() if path.is_file()] == []
        done = run("hook", "install")
        assert done.output.startswith(dry.output)
        assert "--- /dev/null\n+++ b/.pre-commit-config.yaml" in done.output
        assert '+preset = "trt-fp16"' in done.output
        assert "everything is there already" in run("hook", "install").output

    def test_outside_a_repository(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        if any((folder / ".git").exists() for folder in tmp_path.parents):
            pytest.skip("the temporary folder is in a repository")
        with pytest.raises(UsageError, match="not in a git repository"):
            repository(tmp_path)
        monkeypatch.chdir(tmp_path)
        assert run("hook", "install").exit_code == 2


class TestCommands:
    def copy(self, name: str, folder: Path) -> Path:
        for suffix in (".onnx", ".npz"):
            shutil.copyfile(MODELS / f"{name}{suffix}", folder / f"{name}{suffix}")
        return folder / f"{name}.onnx"

    def test_scan_stops_at_an_error_and_reads_the_others(self, tmp_path: Path) -> None:
        bad, good = self.copy("nafnet", tmp_path), self.copy("resnet", tmp_path)
        done = run("hook", "scan", str(bad), str(good))
        assert done.exit_code == 1
        assert "resnet.onnx in FP16: 0 errors" in done.output
        assert run("hook", "scan", str(good)).exit_code == 0

    def test_samples_beside_the_model_are_used(self, tmp_path: Path) -> None:
        bad = self.copy("nafnet", tmp_path)
        bad.with_suffix(".npz").unlink()
        assert run("hook", "scan", str(bad)).exit_code == 0
        assert run("hook", "scan", str(bad), "--inputs", str(MODELS / "nafnet.npz")).exit_code == 1

    def test_the_repository_s_table_is_in_force(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        good = self.copy("resnet", tmp_path)
        (tmp_path / "pyproject.toml").write_text('[tool.rewriter]\nfail-onn = "warning"\n')
        done = run("hook", "scan", str(good))
        assert (done.exit_code, "unknown key 'fail-onn'" in done.output) == (2, True)

    def test_fix_changes_a_file_once(self, tmp_path: Path) -> None:
        path = self.copy("nafnet", tmp_path)
        first = run("hook", "fix", str(path))
        assert (first.exit_code, "fixed; review it" in first.output) == (1, True)
        written = path.read_bytes()
        second = run("hook", "fix", str(path))
        assert (second.exit_code, "already fixed" in second.output) == (0, True)
        assert path.read_bytes() == written
        assert run("hook", "scan", str(path)).exit_code == 0

    def test_the_only_fp32_copy_is_kept(self, tmp_path: Path) -> None:
        path = self.copy("nafnet", tmp_path)
        before, raw = path.read_bytes(), tmp_path / "nafnet.raw.onnx"
        assert "kept as nafnet.raw.onnx" in run("hook", "fix", str(path)).output
        assert raw.read_bytes() == before != path.read_bytes()
        for command in ("scan", "fix"):
            done = run("hook", command, str(raw))
            assert (done.exit_code, "the original of a fixed model" in done.output) == (0, True)
        path.write_bytes(before)
        again = run("hook", "fix", str(path))
        assert (again.exit_code, "only copy" in again.output) == (2, True)
        assert path.read_bytes() == raw.read_bytes() == before

    def test_git_ignores_the_copy_of_an_original(self, repo: Path) -> None:
        path = self.copy("nafnet", repo)
        assert "kept as nafnet.raw.onnx" in run("hook", "fix", str(path)).output
        done = subprocess.run(["git", "status", "--porcelain"], cwd=repo, capture_output=True, text=True)
        assert done.stdout.splitlines() == ["?? nafnet.npz", "?? nafnet.onnx"]

    def test_what_a_commit_holds_needs_no_copy(self, repo: Path) -> None:
        path = self.copy("nafnet", repo)
        git("add", ".", cwd=repo)
        git("commit", "-q", "-m", "the original", cwd=repo)
        assert "fixed; review it" in run("hook", "fix", str(path)).output
        assert not (repo / "nafnet.raw.onnx").exists()

    def test_a_broken_file_is_reported_and_the_others_are_fixed(self, tmp_path: Path) -> None:
        broken, good = tmp_path / "broken.onnx", self.copy("resnet", tmp_path)
        broken.write_bytes(b"no model")
        for command in ("scan", "fix"):
            done = run("hook", command, str(broken), str(good))
            assert done.exit_code == 2
            assert "broken.onnx" in done.output
            assert "resnet.onnx" in done.output
        assert broken.read_bytes() == b"no model"

    def test_a_pointer_of_git_lfs_is_no_model(self, tmp_path: Path) -> None:
        path = tmp_path / "net.onnx"
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
        for command in ("scan", "fix"):
            done = run("hook", command, str(path))
            assert (done.exit_code, "Git LFS has not fetched it" in done.output) == (0, True)


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


def test_pre_commit_accepts_the_manifest(environment: dict[str, str]) -> None:
    done = pre_commit("validate-manifest", ".pre-commit-hooks.yaml", cwd=ROOT, env=environment)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.skipif(os.name == "nt", reason="the script in front of PATH is one of a POSIX shell")
def test_installed_hooks_run_on_a_commit(repo: Path, environment: dict[str, str]) -> None:
    apply(edits(repo, HOOKS[:1]))
    for suffix in (".onnx", ".npz"):
        shutil.copyfile(MODELS / f"nafnet{suffix}", repo / f"nafnet{suffix}")
    git("add", ".", cwd=repo)
    done = pre_commit("run", cwd=repo, env=environment)
    assert done.returncode == 1, done.stderr
    assert "rewriter scan" in done.stdout
    assert "Failed" in done.stdout
    assert "nafnet.onnx in FP16" in done.stdout


@pytest.mark.skipif(os.name == "nt", reason="the script in front of PATH is one of a POSIX shell")
def test_the_manifest_s_hooks_run(repo: Path, environment: dict[str, str], tmp_path: Path) -> None:
    """The real manifest, with the installed `rewriter` in place of an environment of its own.

    `language: python` would install `rewriter` and all it needs once more, from the network.
    """
    source = tmp_path / "source"
    source.mkdir()
    manifest = (ROOT / ".pre-commit-hooks.yaml").read_text()
    assert manifest.count("language: python") == len(HOOKS)
    (source / ".pre-commit-hooks.yaml").write_text(manifest.replace("language: python", "language: system"))
    git("init", "-q", cwd=source)
    git("add", ".", cwd=source)
    git("commit", "-q", "-m", "hooks", cwd=source)
    for suffix in (".onnx", ".npz"):
        shutil.copyfile(MODELS / f"nafnet{suffix}", repo / f"nafnet{suffix}")
    git("add", ".", cwd=repo)
    fixed = pre_commit("try-repo", str(source), "rewriter-fix", "--all-files", cwd=repo, env=environment)
    assert "files were modified by this hook" in fixed.stdout, fixed.stdout + fixed.stderr
    git("add", ".", cwd=repo)
    again = pre_commit("try-repo", str(source), "--all-files", cwd=repo, env=environment)
    assert again.returncode == 0, again.stdout
    assert again.stdout.count("Passed") == len(HOOKS)
