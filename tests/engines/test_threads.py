"""`fix` from several threads of a process writes what it writes from one."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest
from paths import ROOT

import rewriter
from rewriter.base import sandbox

NAMES = ("if_loop", "local_function", "matmul_clip", "mixed_casts", "qdq")


def digest(output: Path, name: str) -> str:
    model = ROOT / f"models/{name}.onnx"
    rewriter.fix(model, output, inputs=model.with_suffix(".npz"), build=False)
    return hashlib.sha256(output.read_bytes()).hexdigest()


@pytest.mark.skipif(not sandbox.FORKS, reason="forks are used on Linux alone")
def test_four_threads_write_what_one_writes(tmp_path: Path) -> None:
    """Products of each thread run in OpenBLAS's threads while the others start children."""
    one = {name: digest(tmp_path / f"{name}.onnx", name) for name in NAMES}
    with ThreadPoolExecutor(4) as threads:
        runs = [
            (name, threads.submit(digest, tmp_path / f"{name}.{number}.onnx", name))
            for number, name in product(range(2), NAMES)
        ]
        assert [(name, run.result(timeout=300)) for name, run in runs] == [(n, one[n]) for n, _ in runs]
