"""Models as text: what is written can be read again, and what cannot be read is an error."""

from pathlib import Path

import pytest
from paths import MODELS
from typer.testing import CliRunner

from rewriter.base.errors import ModelError
from rewriter.cli import app
from rewriter.ir.model import load
from rewriter.pipeline import onnx_text

EVERYTHING = """<ir_version: 10, opset_import: ["" : 21, "local" : 1]>
g (float[N,?,"2*N"] x, seq(float[2]) s, optional(float) o, bool c, float[] u) => (float y)
   <float16[2] half =  {15360,49152},
    double big =  {1e+300},
    float[3] special =  {inf,-inf,-3.4028235e+38},
    string[2] words = {"a b", "c"},
    bool[2] truth =  {1,0},
    float[0] none =  {},
    float[2] plugged,
    float[20,30] weight>
{
   ["a/b"] "x:0", z = local.gate <alpha: float = 0.1, sizes: ints = [1, 2]> (x, "", half)
   plugged = MyPlugin <kinds: strings = ["a", "b"], value: tensor = float[2] {1,-2}, empty: ints = []> ("x:0")
   y = If (c) <then_branch: graph = t () => (float v) {
      v = Neg (z)
   }, else_branch: graph = e () => (float w) {
      p = Neg (z)
      w = Neg (p)
   }>
}
<domain: "local", opset_import: ["" : 21]>
gate <alpha>(a, b, c) => (d, e)
{
   d = Elu <alpha: float = @alpha> (a)
   e = Neg (d)
}"""


def test_what_is_written_is_read_again() -> None:
    assert onnx_text.render(onnx_text.parse(EVERYTHING)) == EVERYTHING


def test_constants_without_values_are_random_and_the_same_each_time() -> None:
    first, second = (onnx_text.parse(EVERYTHING).graph.initializer for _ in range(2))
    assert {tensor.name: list(tensor.dims) for tensor in first}["weight"] == [20, 30]
    assert list(first) == list(second)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param("g (float x) => (float y) { y = Neg(x)", "it is not ONNX text", id="no end"),
        pytest.param("g (float x) => (float y) <int64[2] n> { y = Neg(x) }", "only a float", id="integers"),
        pytest.param("g (float x) => (float y) <float[N] n> { y = Neg(x) }", "known shape", id="no size"),
    ],
)
def test_unreadable(text: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        onnx_text.parse(text)


def test_a_pass_on_a_text_is_a_report_that_can_be_read_again(tmp_path: Path) -> None:
    graph = tmp_path / "graph.txt"
    graph.write_text('g (float[2,3] x) => (float[3,2] y) { y = Einsum <equation = "IJ->JI"> (x) }')
    report = CliRunner().invoke(app, ["passes", "run", "decompose-einsum", str(graph)]).stdout
    assert report.splitlines() == [
        " g (float[2,3] x) => (float[3,2] y) {",
        '-   y = Einsum <equation: string = "IJ->JI"> (x)',
        '+   ["y/Einsum"] y = Einsum <equation: string = "ab->ba"> (x)',
        " }",
        "changed Einsum(y): IJ->JI became ab->ba",
    ]
    graph.write_text(report)
    assert CliRunner().invoke(app, ["passes", "run", "decompose-einsum", str(graph)]).stdout == report


def test_a_model_can_be_shown_too() -> None:
    path = MODELS / "conv_clip.onnx"
    shown = CliRunner().invoke(app, ["passes", "run", "decompose-einsum", str(path)]).stdout
    assert load(path).signature == load(onnx_text.parse(shown)).signature


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(app, ["passes", "run", "decompose-einsum", str(tmp_path / "none.txt")])
    assert outcome.exit_code == 2
    assert "it cannot be read as text" in outcome.stderr
