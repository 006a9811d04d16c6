"""The commands that `fix`, `scan` and `verify` print, run as printed; test_pages.py runs the pages."""

import os
import re
import shlex
import subprocess
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_lines import invoke, python
from graphs import graph

from rewriter.ir.model import save

NET = """
    g (float[n,3,h,w] x) => (float[n,3,h,w] y) <float big = {1e3}, float eps = {1e-12}> {
        ["/scale"] a = Mul(x, big) ["/square"] s = Mul(a, a)
        ["/mean"] m = ReduceMean <axes = [1]> (s) ["/eps"] e = Add(m, eps) ["/root"] r = Sqrt(e)
        ["/norm"] y = Div(a, r) }"""
"""A norm of its own over channels, which overflows in FP16."""

SIZED = """
    g (float[1,3,8,8] x, int64[2] size) => (float[1,3,?,?] y) <int64[2] head = {1, 3}> {
        s = Concat <axis = 0> (head, size) y = Resize <mode = "linear"> (x, , , s) }"""

COMMANDS = re.compile(r"^(?:Next|then|or) {2,}(?P<command>.+)$", re.MULTILINE)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with models and data, which is the current one; no engine is built."""
    pillow = pytest.importorskip("PIL.Image", reason="Pillow is not installed: pip install '.[dev]'")
    values = np.random.default_rng(0)
    save(graph(NET), tmp_path / "net.onnx")
    save(graph(NET), tmp_path / "it's a net.onnx")
    save(graph(SIZED), tmp_path / "sized.onnx")
    np.savez(tmp_path / "data.npz", x=values.random((1, 3, 24, 16), dtype=np.float32))
    np.savez(tmp_path / "sized.npz", x=np.ones((1, 3, 8, 8), np.float32), size=np.array([20, 30]))
    (tmp_path / "my photos").mkdir()
    for index in range(2):
        picture = values.integers(0, 256, (32, 32, 3), dtype=np.uint8)
        pillow.fromarray(picture).save(tmp_path / "my photos" / f"{index}.png")
    wrong = onnx.load(tmp_path / "net.onnx")
    wrong.graph.node[-1].op_type = "Mul"
    onnx.save(wrong, tmp_path / "wrong.onnx")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REWRITER_BUILD", "false")
    return tmp_path


def run(line: str) -> tuple[int, list[str]]:
    """The exit code of a command of ours, and the commands that it prints."""
    program, *words = shlex.split(line)
    assert program == "rewriter"
    done = invoke(*words)
    assert done.exit_code in (0, 1), done.output
    return done.exit_code, [match["command"] for match in COMMANDS.finditer(done.output)]


PROFILE = "--min-shapes x:1x3x8x8 --max-shapes x:4x3x32x32"
FIXES = {
    "a file of samples": "rewriter fix net.onnx -o out.onnx --inputs data.npz",
    "blanks and a quote": 'rewriter fix "it\'s a net.onnx" -o "it\'s fixed.onnx" --inputs data.npz',
    "photographs": "rewriter fix net.onnx -o out.onnx --inputs 'my photos' --image-preprocess size=32",
    "a profile": f"rewriter fix net.onnx -o out.onnx --inputs data.npz {PROFILE}",
    "random data of a shape": "rewriter fix net.onnx -o out.onnx --input-shapes x:2x3x8x8 --seed 3",
    "values": "rewriter fix sized.onnx -o out.onnx --input-values size=20x30",
    "a limit": "rewriter fix net.onnx -o out.onnx --inputs data.npz --tolerance 30 --metric psnr",
}


@pytest.mark.parametrize("line", FIXES.values(), ids=FIXES.keys())
def test_what_fix_prints_runs(line: str, desk: Path) -> None:
    _, commands = run(line)
    build, verify = commands
    tool, model, *_ = shlex.split(build)
    assert tool == "trtexec" and (desk / model.removeprefix("--onnx=")).is_file()
    code, following = run(verify)
    assert (code, following) == (0, []), "the result is as good where it is verified"


SCRIPTS = {
    "shapes": "rewriter fix net.onnx -o 'my out.onnx' --inputs data.npz --deploy",
    "values": "rewriter fix sized.onnx -o 'my out.onnx' --inputs sized.npz --deploy",
}


@pytest.mark.skipif(find_spec("tensorrt_rtx") is None, reason="TensorRT-RTX is not installed")
@pytest.mark.parametrize("line", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_the_script_that_fix_prints_builds_an_engine(line: str, desk: Path) -> None:
    _, (build, _) = run(f"{line} python --target tensorrt-rtx")
    program, *words = shlex.split(build)
    assert program == "python"
    done = python(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (desk / "my out.engine").stat().st_size


def test_the_script_of_the_shell_that_fix_prints_runs(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (desk / "trtexec").write_text('#!/bin/sh\nfor word in "$@"; do echo "$word" >> words; done\n')
    (desk / "trtexec").chmod(0o755)
    monkeypatch.setenv("PATH", f"{desk}:{os.environ['PATH']}")
    _, (build, _) = run(f"{SCRIPTS['values']} trtexec")
    subprocess.run(build, shell=True, check=True)
    assert "--optShapes=size:20x30" in (desk / "words").read_text().splitlines()


@pytest.mark.parametrize("data", ["--inputs data.npz", "--input-shapes x:1x3x8x8", ""])
def test_what_scan_prints_runs(data: str, desk: Path) -> None:
    _, (fix,) = run(f"rewriter scan net.onnx {data}")
    code, commands = run(fix)
    assert code == 0 and (desk / "net.fixed.onnx").is_file() and len(commands) == 2


@pytest.mark.parametrize("data", ["--inputs data.npz", "--input-shapes x:1x3x8x8"])
def test_what_verify_prints_runs_and_finds_the_tensor(data: str, desk: Path) -> None:
    code, (locate,) = run(f"rewriter verify net.onnx wrong.onnx {data}")
    assert code == 1
    assert run(locate) == (1, [])


def test_what_errors_say_to_run_parses(desk: Path) -> None:
    done = invoke("fix", "net.onnx", "sized.onnx")
    (line,) = re.findall(r"what to do: (rewriter batch .*) fixes them all", done.output)
    (desk / "FOLDER").mkdir()
    assert invoke(*shlex.split(line)[1:]).exit_code == 0
