"""A run writes its output, its cache and temporary files, and nothing else; it opens no connection."""

import gc
import json
import os
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import onnx
import pytest
from graphs import graph
from paths import ROOT

import rewriter
from rewriter.base import sandbox
from rewriter.ir.model import Model, save

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
            m = Identity(b) y = Neg(m)
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


@pytest.mark.skipif(not sandbox.FORKS, reason="libraries get the model in a fork, on Linux only")
def test_the_model_is_rarely_parsed_and_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Facts belong to a revision: nobody hashes the graph, and one child checks it and infers its shapes."""
    monkeypatch.setattr(sandbox, "inside", False)
    calls = Counter[str]()
    kinds = {
        "ParseFromString": "parsed",
        "SerializeToString": "written",
        "SerializePartialToString": "written",
        "__deepcopy__": "copied",
        "CopyFrom": "copied",
    }

    def profile(_frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and isinstance(function.__self__, onnx.ModelProto):
            calls[kinds.get(function.__name__, "")] += 1

    source = ROOT / "models" / "bert.onnx"
    sys.setprofile(profile)
    try:
        rewriter.fix(source, tmp_path / "fixed.onnx", inputs=source.with_suffix(".npz"), build=False)
    finally:
        sys.setprofile(None)
    assert calls["parsed"] <= 4, "the source, and models that onnx and onnxsim made"
    assert calls["written"] <= 13
    assert calls["copied"] <= 20
