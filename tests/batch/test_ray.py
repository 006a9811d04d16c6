"""`rewriter batch --ray` on a cluster of two workers of this machine, of which one is killed."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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

    def __init__(self, *memory_mib: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("ray_cluster.py"), *map(str, memory_mib)],
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

    def kill(self, order: str = "kill") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{order}\n")
        self.process.stdin.flush()
        assert self.answer() == "killed"

    def close(self) -> None:
        self.process.communicate(timeout=120)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster(4096, 4096)
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
    first = next(line for line in running.stderr if line.startswith("["))
    cluster.kill()
    stdout, rest = running.communicate(timeout=300)
    assert running.returncode == 0, first + rest
    assert json.loads(stdout)["passed"], stdout  # what Ray prints on the death of a worker is not in it
    assert run(models, "-o", models.parent / "one", "--jobs=1", *FAST).returncode == 0
    assert results(fixed) == results(models.parent / "one")
    assert len(results(fixed)) == len(BODIES)


@pytest.mark.parametrize("order", ["kill", "behead"])
def test_a_batch_ends_if_a_large_worker_or_the_head_dies(order: str, models: Path, tmp_path: Path) -> None:
    """Tasks of the only worker with memory for them are given to the small one; nobody replaces a head."""
    cluster, fixed = Cluster(100, 4096), tmp_path / "fixed"
    command = batch(models, "-o", fixed, "--ray", cluster.address, "--json=-", *FAST)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = subprocess.Popen(command, env=environment(), **pipes)
    assert running.stderr is not None
    first = next(line for line in running.stderr if line.startswith("["))
    cluster.kill(order)
    start = time.monotonic()
    stdout, rest = running.communicate(timeout=300)
    seconds = time.monotonic() - start
    cluster.close()
    endings = json.loads(stdout)["endings"]
    assert sum(endings.values()) == len(BODIES), first + rest
    assert running.returncode == (0 if order == "kill" else 1), stdout
    assert order == "kill" or ("the cluster is lost" in stdout and endings["crashed"] < len(BODIES))
    assert len([*fixed.glob("*.batch.json")]) == len(BODIES) - endings.get("crashed", 0)
    assert seconds < 120
