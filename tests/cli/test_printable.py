"""Names in models reach the terminal with control characters spelled out, in reports and in errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from graphs import graph
from rich.table import Table
from typer.testing import CliRunner

from rewriter import cli
from rewriter.ir.english import printable
from rewriter.ir.model import Model, load, save
from rewriter.report.terminal import console

EVIL = "a\x1b]0;title\x07b\x9b31mc\r\u202ed"
"""Sets the window's title, turns the text red (8-bit CSI), goes to the start of the line, reverses."""

CONTROLS = {"\x1b", "\x07", "\x9b", "\r", "\u202e"}


def evil() -> Model:
    """exp overflows FP16; every name in the graph is hostile."""
    source = graph(
        """
        g (float[1,64] x) => (float[1,64] y) <float big = {30.0}> {
            [first] a = Add(x, big)
            [second] b = Exp(a)
            [third] y = Sub(b, big)
        }"""
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


COMMANDS = [
    pytest.param("scan {} -v", "second", id="scan"),
    pytest.param("fix {} --dry-run -v --engine emulation", "third", id="fix"),
    pytest.param("verify {} {} --engine emulation -v", "", id="verify"),
    pytest.param("locate {} {} --engine emulation", "", id="locate"),
    pytest.param("scan {} --input-shapes z:1x2", "x", id="an error"),
    pytest.param("hook scan {} -v", "second", id="hook"),
]


@pytest.mark.parametrize(("command", "named"), COMMANDS)
def test_no_control_character_is_printed(model: Path, command: str, named: str) -> None:
    outcome = CliRunner().invoke(cli.app, command.replace("{}", str(model)).split())
    assert outcome.exit_code in (0, 1, 2), outcome.output
    text = outcome.stdout + outcome.stderr
    assert not CONTROLS & set(text)
    assert named in text
    if named:
        assert "\\x1b]0;title" in "".join(text.split())


def test_a_report_in_json_holds_the_name_as_it_is(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    assert CliRunner().invoke(cli.app, ["scan", str(model), "--json", str(path), "-q"]).exit_code == 0
    text = path.read_text(encoding="utf-8")
    assert not CONTROLS & set(text), "it may be shown on a terminal, too"
    assert any(EVIL in node for finding in json.loads(text)["findings"] for node in finding["nodes"])


def test_tables_and_own_colours_stay() -> None:
    out = console()
    table = Table(box=None)
    table.add_column("a\x1bb", style="bold")
    table.add_row("é\n中\t\x1b[1m")
    with out.capture() as captured:
        out.print(table)
    assert "\x1b" not in captured.get()
    assert "é" in captured.get() and "中" in captured.get()


@pytest.mark.parametrize("text", ["plain", "é中🎉", "two\nlines\tand a tab", "back\\slash"])
def test_other_text_stays(text: str) -> None:
    assert printable(text) == text
