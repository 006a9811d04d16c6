"""The light install in a fresh environment: its size, and a model from scan to verdict."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import MODELS, ROOT

MOST_BYTES = 250 << 20


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh virtual environment without packages."""
    folder = tmp_path_factory.mktemp("light")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return folder


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def size(environment: Path) -> int:
    """Bytes on disk of the installed packages, blocks counted whole."""
    (site,) = {path.resolve() for path in environment.glob("lib*/python*/site-packages")}  # lib64 is a link
    return sum(file.lstat().st_blocks * 512 for file in site.rglob("*"))


def test_a_fresh_light_install_is_small_and_verifies_a_model(environment: Path, tmp_path: Path) -> None:
    bare = size(environment)
    python, program = environment / "bin/python", environment / "bin/rewriter"
    run(python, "-m", "pip", "install", "-q", "-r", ROOT / "requirements-light.txt", cwd=tmp_path)
    run(python, "-m", "pip", "install", "-q", "--no-deps", ROOT, cwd=tmp_path)
    assert size(environment) - bare < MOST_BYTES
    installed = run(python, "-m", "pip", "list", cwd=tmp_path)
    assert not any(name in installed for name in ("tensorrt", "onnxruntime-gpu", "scipy", "torch"))
    model, data = MODELS / "nafnet.onnx", MODELS / "nafnet.npz"
    assert "10 errors" in run(program, "scan", model, "--inputs", data, cwd=tmp_path)
    fixed = run(program, "fix", model, "-o", "fixed.onnx", "--inputs", data, "--strict", cwd=tmp_path)
    assert fixed.startswith("Emulated on random data, which is no proof: fixed.onnx")
