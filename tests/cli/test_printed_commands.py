"""The commands that `fix`, `scan` and `verify` print, run as printed; test_pages.py runs the pages."""

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_lines import invoke, python
from graphs import graph
from rich.text import Text
from tables import values

from rewriter.base.text import command_line, one_line
from rewriter.ir.model import Model, load, save
from rewriter.report.tables import Cell, Table
from rewriter.report.terminal import console, printed

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


EVIL = "a\x1b]0;title\x07b\x9b31mc\r\u202ed\n::error file=a,line=1::e\x85Verified f\u2028##vso[g]h [red][i](http://j)"
"""Sets the window's title, turns the text red (8-bit CSI), goes to the start of the line, reverses, begins
lines in three ways, gives commands to GitHub and Azure, and looks like markup of rich and of Markdown."""

CONTROLS = {"\x1b", "\x07", "\x9b", "\r", "\u202e", "\x85", "\u2028"}
FORGED = re.compile(r"^\s*(?:::error|Verified f|e$)|##vso\[", re.MULTILINE)


def evil() -> Model:
    """exp overflows FP16; every name in the graph is hostile."""
    source = graph(
        """
        g (float[1,64] x) => (float[1,64] y) <float big = {30.0}> {
            [first] a = Add(x, big) [second] b = Exp(a) [third] y = Sub(b, big) }"""
    ).whole()
    for node in source.graph.node:
        node.name += EVIL
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                names[index] = name + EVIL
    for value in (*source.graph.input, *source.graph.output):
        value.name += EVIL
    for constant in source.graph.initializer:
        constant.name += EVIL
    return load(source)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(evil(), tmp_path / "m.onnx")


@values
def test_no_control_character_is_printed(model: Path, command: str, named: str) -> None:
    outcome = invoke(*command.replace("{}", str(model)).split())
    assert outcome.exit_code in (0, 1, 2), outcome.output
    text = outcome.stdout + outcome.stderr
    assert not CONTROLS & set(text)
    assert not FORGED.search(text)
    assert named in text
    if named:
        assert "[red]" in "".join(text.split())
        assert "\\x1b]0;title" in "".join(text.split())


def test_a_report_in_json_holds_the_name_as_it_is(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    assert invoke("scan", model, "--json", path, "-q").exit_code == 0
    text = path.read_text(encoding="utf-8")
    assert not CONTROLS & set(text), "it may be shown on a terminal, too"
    assert any(EVIL in node for finding in json.loads(text)["findings"] for node in finding["nodes"])


def test_a_page_and_a_log_for_code_hosts_hold_it_on_one_line(model: Path, tmp_path: Path) -> None:
    page, log = tmp_path / "r.html", tmp_path / "r.sarif"
    assert invoke("scan", model, "--report", page, "--sarif", log, "-q").exit_code == 0
    text = page.read_text(encoding="utf-8")
    assert not CONTROLS & set(text) and not re.search(r"u202e|^::error", text.replace("\\u202e", ""), re.M)
    (run,) = json.loads(log.read_text(encoding="utf-8"))["runs"]
    shown = json.dumps(run, ensure_ascii=False)
    assert "second" in shown and not CONTROLS & set(shown) and not re.search(r"(?<!\\)\\n", shown)
    messages = [result["message"]["text"] for result in run["results"]]
    assert any("[i" in text for text in messages) and not any("](" in text for text in messages)


def test_a_name_of_a_file_is_on_one_line_too(tmp_path: Path) -> None:
    folder = tmp_path / "\n::error::x"
    folder.mkdir()
    path = save(evil(), folder / "-m\n\u202e.onnx")
    for words in (["scan", str(path)], ["scan", f"{path}x"], ["hook", "scan", str(path)]):
        outcome = invoke(*words)
        text = outcome.stdout + outcome.stderr
        assert "\u202e" not in text and not FORGED.search(text)


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="names of files are Unicode there")
def test_a_name_of_a_file_need_not_be_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    name = "m\udcff.onnx"
    save(graph("g (float[2] x) => (float[2] y) { y = Exp(x) }"), tmp_path / name)
    command = ["scan", name, "--json", "r.json", "--sarif", "r.sarif", "--report", "r.html"]
    for words in (command, ["report", "r.json", "-o", "again.html"]):
        outcome = invoke(*words)
        assert outcome.exit_code == 0, outcome.output
    assert "m%FF.onnx" in (tmp_path / "r.sarif").read_text()
    assert "m\\udcff.onnx" in (tmp_path / "again.html").read_text()


@pytest.mark.parametrize(
    "word", ["plain", "two words", "it's", "a\nb'c\\d", "é\u202e\x9b", "\udcff", "\x1b[1m ::error::", "$(id)"]
)
def test_a_printed_command_is_one_line_that_a_shell_reads_as_the_words(word: str) -> None:
    line = command_line(["printf", "%s|%s", word, Path(f"-{word}")])
    assert line == one_line(line)
    output = subprocess.run(["bash", "-c", line], capture_output=True, check=True, env={"LC_ALL": "C.UTF-8"})
    assert output.stdout == os.fsencode(f"{word}|./-{word}")


def test_tables_and_own_colours_stay() -> None:
    out = console()
    with out.capture() as captured:
        out.print(printed(Table({"a": "text"}, [[Cell("é\n中\t\x1b[1m")]])), Text("b\n::error::"))
    assert "\x1b" not in captured.get() and "é\\n中\\t\\x1b[1m" in captured.get()
    assert "\n::" not in captured.get()


@pytest.mark.parametrize("text", ["plain", "é中🎉", "two words", "back\\slash", "aten::add", "👩\u200d💻"])
def test_other_text_stays(text: str) -> None:
    assert one_line(text) == text
