"""Names in models reach the terminal with control characters spelled out, in reports and in errors."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command_lines import invoke
from graphs import graph
from rich.text import Text
from tables import values

from rewriter.base.text import command_line, one_line
from rewriter.ir.model import Model, load, save
from rewriter.report.tables import Cell, Table
from rewriter.report.terminal import console, printed

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
