"""A run writes its output, its cache and temporary files, and nothing else; it opens no connection."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from graphs import graph
from paths import ROOT

import rewriter
from rewriter.ir.model import Model, facts, save

SCRIPT = """
import json, os, sys
seen = {"written": [], "sockets": []}
def hook(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and arguments[2] is not None:
        if arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            seen["written"].append(os.path.abspath(arguments[0]))
    if event in ("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.sendto"):
        seen["sockets"].append([event, repr(arguments)])
    if event == "socket.__new__" and arguments[1] not in (-1, 1):  # pairs of processes are of family AF_UNIX
        seen["sockets"].append([event, repr(arguments)])
sys.addaudithook(hook)
from rewriter.cli import main
try:
    main()
finally:
    with open(os.environ["SEEN"], "w") as file:
        json.dump(seen, file)
"""


@pytest.mark.parametrize("command", ["scan", "fix"])
def test_nothing_is_written_elsewhere(command: str, tmp_path: Path) -> None:
    home, temporary, work, out = (tmp_path / name for name in ("home", "temporary", "work", "out"))
    for folder in (home, temporary, work, out):
        folder.mkdir()
    source = graph("g (float[2,8] x) => (float[2,8] y) { [SECRET] a = Exp(x) b = Exp(a) y = Relu(b) }")
    model = save(source, work / "model.onnx")
    before = everything(home, temporary, work)
    arguments = [command, str(model), *(["-o", str(out / "fixed.onnx")] if command == "fix" else [])]
    env = plain(home) | {"TMPDIR": str(temporary), "SEEN": str(tmp_path / "seen")}
    order = [sys.executable, "-c", SCRIPT, *arguments]
    done = subprocess.run(order, env=env, cwd=work, capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 1), done.stderr
    seen = json.loads((tmp_path / "seen").read_text())
    assert seen["sockets"] == []
    after = everything(home, temporary, work)
    cache = home / ".cache/rewriter"
    assert [path for path in after - before if path.is_file() and cache not in path.parents] == []
    assert {path.name for path in out.iterdir()} == ({"fixed.onnx"} if command == "fix" else set())
    allowed = (cache, temporary, out, Path("/dev"), Path("/proc"))
    strays = [path for path in seen["written"] if not any(Path(path).is_relative_to(one) for one in allowed)]
    assert strays in ([], [str(tmp_path / "seen")])


def plain(home: Path) -> dict[str, str]:
    """The environment of a user without settings."""
    own = ("XDG_", "REWRITER_", "ORT_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(own)}
    return kept | {"HOME": str(home), "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}


def everything(*folders: Path) -> set[Path]:
    return {path for folder in folders for path in folder.rglob("*")}


def test_onnx_runtime_keeps_no_records(tmp_path: Path) -> None:
    code = "from rewriter.runtime.engines.onnxruntime_library import import_onnxruntime as load; load()"
    subprocess.run([sys.executable, "-c", code], env=plain(tmp_path), check=True, timeout=120)
    assert list(tmp_path.rglob("*")) == []


def test_no_model_is_left_to_the_garbage_collector() -> None:
    """Its weights would stay in memory until then, and arrays are few objects: collections are rare."""
    source = graph("""
        g (float[2,64] x) => (float[2,64] y) <float k = {3.0}, bool go = {1}> {
            a = Mul(x, k)
            b = If (go) <then_branch = t () => (float[2,64] c) { c = Exp(a) },
                         else_branch = e () => (float[2,64] d) { d = Relu(a) }>
            m = Identity(b)
            y = Neg(m)
        }""")
    fix = partial(rewriter.fix, source, build=False, verify=True)
    fix()  # what is made once and kept
    gc.collect()
    gc.disable()
    try:
        fix()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = sum(isinstance(one, Model) for one in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert left == 0


def test_few_graphs_of_a_run_have_their_shapes_inferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """The original, and one for each pass that changes something; all else asks the model."""
    inferred = Mock(wraps=facts.infer)
    monkeypatch.setattr("rewriter.ir.model.model.infer", inferred)
    rewriter.fix(ROOT / "models" / "bert.onnx", build=False)
    assert inferred.call_count <= 8
