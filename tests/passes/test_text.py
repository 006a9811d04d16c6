"""Passes on the graphs of text/: what comes out, to the letter, and that it computes the same.

A file holds cases of one pass, named as its folder. A case is

    === what it shows
    opset 21                         and other settings (`_SETTINGS`); above the first case: for all
     g (float[4] x) => (float[4] y) {
    -   a = Cast <to: int = 1> (x)   a line that the pass removes
    -   y = Relu (a)
    +   y = Relu (x)                 a line that it adds
     }
    changed Cast(a): ...
    declined Cast(b): ...

To add one, write its title and its graph: constants without values, and those of more than 16 floats, are
random. Then
`pytest -n 0 tests/passes/test_text.py --update` writes what the passes give now: read its diff.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import onnx_text
import pytest
from graphs import apply, random_feeds, run, same_results

from rewriter.ir.model import load
from rewriter.ir.plan import NodePatterns
from rewriter.passes.base import Context, Pass
from rewriter.pipeline.text import parse
from rewriter.target import Target

TEXT = Path(__file__).parent / "text"

_SETTINGS = {
    "with": "the pass with options, as a pipeline has it",
    "opset": "the highest that the pass may use (17)",
    "target": "as --target",
    "answers": "of probes: name=answer",
    "keep": "nodes that the user keeps in FP32",
    "keep-ops": "operators that the user keeps in FP32",
    "not-compared": "why results are not compared on ONNX Runtime",
}
_SETTING = re.compile(rf"({'|'.join(_SETTINGS)}) (.+)")


@dataclass(frozen=True)
class Case:
    """A graph, and what is expected of a pass."""

    file: Path
    title: str
    text: str
    settings: dict[str, str]

    @classmethod
    def read(cls, file: Path, text: str, settings: dict[str, str]) -> Case:
        title, _, body = text.partition("\n")
        own = _settings(body)
        return cls(file, title, "\n".join(body.strip("\n").split("\n")[len(own) :]), settings | own)

    @property
    def step(self) -> Pass:
        (step,) = parse(self.settings.get("with", self.file.parent.name.replace("_", "-")))
        return step

    @property
    def context(self) -> Context:
        words = {name: tuple(self.settings.get(name, "").split()) for name in ("answers", "keep", "keep-ops")}
        answers = dict(answer.split("=") for answer in words["answers"])
        named = Target.parse(self.settings.get("target", "tensorrt"))
        target = Target(named.library, named.version, answers)
        return Context(
            int(self.settings.get("opset", 17)), target, kept=NodePatterns(words["keep"], words["keep-ops"])
        )


def _settings(text: str) -> dict[str, str]:
    matches = map(_SETTING.fullmatch, text.split("\n"))
    return {match[1]: match[2] for match in takewhile(bool, matches) if match}


def _cases() -> Iterator[object]:
    for file in sorted(TEXT.glob("*/*.txt")):
        common, *texts = re.split(r"^=== ", file.read_text(), flags=re.MULTILINE)
        for text in texts:
            case = Case.read(file, text, _settings(common))
            yield pytest.param(case, id=f"{file.parent.name}/{file.stem}: {case.title}")


@pytest.mark.parametrize("case", list(_cases()))
def test_the_graph_becomes(case: Case, request: pytest.FixtureRequest) -> None:
    before = load(onnx_text.parse(case.text))
    after, result = apply(case.step, before, case.context)
    outcome = "\n".join(onnx_text.outcome(before, after, [result]))
    if after is not before:
        assert apply(case.step, after, case.context)[0] is after, "a second run changes it again"
        if "not-compared" not in case.settings:
            for first in (1, 0):
                feeds = random_feeds(before, first, turns=True)
                same_results(case.step.exactness, run(before, feeds), run(after, feeds))
    if request.config.getoption("--update"):
        _update(case, outcome)
    else:
        assert outcome == case.text, "to take what the pass gives now: --update -n 0, and read the diff"


def _update(case: Case, outcome: str) -> None:
    assert "PYTEST_XDIST_WORKER" not in os.environ, "--update needs -n 0"
    head, title, rest = case.file.read_text().partition(f"=== {case.title}\n")
    case.file.write_text(head + title + rest.replace(case.text, outcome, 1))


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
