"""`rewriter batch --ray` on a cluster of two workers of this machine, of which one is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from graphs import graph
from paths import ROOT

from rewriter.ir.model import save

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install ray"),
    pytest.mark.skipif(
        os.environ.get("REWRITER_NIGHTLY") != "1",
        reason="a cluster needs a minute: REWRITER_NIGHTLY=1 runs it",
    ),
]

BODIES = [
    "a = Exp(x) y = Relu(a)",
    "a = Abs(x) y = Sqrt(a)",
    "a = Sigmoid(x) y = Add(a, x)",
    "a = Tanh(x) y = Mul(a, x)",
    "a = Softmax(x) y = Sub(x, a)",
]
FAST = ("--no-build", "--engine=emulation")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ray") / "models"
    folder.mkdir()
    for number, body in enumerate(BODIES):
        save(graph(f"g (float[2,8] x) => (float[2,8] y) {{ {body} }}"), folder / f"net{number}.onnx")
    return folder


def environment() -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if name != "REWRITER_NIGHTLY"},
        "PYTHONPATH": str(ROOT),
        "REWRITER_CONFIG": "none",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


class Cluster:
    """The process that holds a cluster, and its address."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("ray_cluster.py")],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.address = self.answer()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill_a_worker(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("kill\n")
        self.process.stdin.flush()
        assert self.answer() == "killed"

    def close(self) -> None:
        self.process.communicate(timeout=120)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.close()


def batch(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "rewriter", "batch", *map(str, arguments)]


def results(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("*.onnx")}


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        batch(*arguments), env=environment(), capture_output=True, text=True, timeout=300, check=False
    )


def test_gpus_that_are_not_there_are_refused(cluster: Cluster, models: Path) -> None:
    done = run(models, "-o", models.parent / "none", "--ray", cluster.address, "--gpus=3")
    assert done.returncode == 2
    assert "the cluster has 0, and each model reserves 3" in done.stderr


def test_nothing_is_lost_with_a_worker(cluster: Cluster, models: Path) -> None:
    fixed = models.parent / "ray"
    order = batch(models, "-o", fixed, "--ray", cluster.address, "--json=-", *FAST)
    running = subprocess.Popen(
        order, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert running.stderr is not None
    first = running.stderr.readline()
    cluster.kill_a_worker()
    stdout, rest = running.communicate(timeout=300)
    assert running.returncode == 0, first + rest
    assert json.loads(stdout)["passed"], stdout  # what Ray prints on the death of a worker is not in it
    assert run(models, "-o", models.parent / "one", "--jobs=1", *FAST).returncode == 0
    assert results(fixed) == results(models.parent / "one")
    assert len(results(fixed)) == len(BODIES)
