"""Norms as exporters write them, for tests: the table of patterns/norms.txt."""

from collections.abc import Iterator
from typing import Any

import pytest
from graphs import graph
from paths import ROOT

from rewriter.ir.graph import open_graphs
from rewriter.ir.model import Model
from rewriter.ir.patterns.norms import Norm, find_norms

INPUTS = "float[2,4,8] x, float[8] s, float[8] b"

CONSTANTS = (
    "<float two = {2.0}, float one = {1.0}, float zero = {0.0}, float half = {0.5}, "
    "float minus_half = {-0.5}, float eps = {0.00001}, float tiny = {1e-12}, float eight = {8.0}, "
    "float eighth = {0.125}, int64[1] last = {-1}>"
)


def units(source: Model) -> list[Norm]:
    """The norms of all graphs of a model."""
    return [n for g in open_graphs(source) for n in find_norms(g)]


def build(body: str, inputs: str = INPUTS, output: str = "float[2,4,8] y", opset: int = 17) -> Model:
    return graph(f"g ({inputs}) => ({output}) {CONSTANTS} {{ {body} }}", opset=opset)


MEAN = "m = ReduceMean<axes = [-1]>(x)"
VARIANCE = f"{MEAN} d = Sub(x, m) q = Pow(d, two) v = ReduceMean<axes = [-1]>(q)"
CORE = f"{VARIANCE} e = Add(v, eps) r = Sqrt(e) n = Div(d, r)"
AFFINE = "w = Mul(n, s) y = Add(w, b)"
POWER = "q = Pow(x, two) v = ReduceMean<axes = [-1]>(q) e = Add(v, eps) r = Sqrt(e)"
CHANNEL = "m = ReduceMean<axes = [1]>(x) d = Sub(x, m) q = Pow(d, two) v = ReduceMean<axes = [1]>(q)"
FACTOR = "e = Add(v, eps) r = Sqrt(e) i = Reciprocal(r) f = Mul(i, s)"
FLAX = (
    "w = Constant<value_ints = [2, 4, 1]>() t = ReduceSum<keepdims = 0>(x, last) c = Mul(t, eighth)"
    " q = Mul(x, x) u = ReduceSum<keepdims = 0>(q, last) a = Mul(u, eighth) p = Mul(c, c) g = Sub(a, p)"
    " v = Max(zero, g) j = Reshape(v, w) k = Expand(j, w) e = Add(k, eps) r = Sqrt(e) h = Reciprocal(r)"
    " l = Reshape(c, w) m = Expand(l, w) d = Sub(x, m)"
)
FRAGMENTS = {name: text for name, text in globals().items() if name.isupper() and isinstance(text, str)}


def _rows(section: str) -> Iterator[list[str]]:
    """The lines of a section of the table: name, body with its fragments, and what else there is."""
    text = (ROOT / "tests/patterns/norms.txt").read_text(encoding="utf-8").partition(f"[{section}]")[2]
    for line in text.partition("\n[")[0].splitlines()[1:]:
        if line:
            name, body, *more = line.split(" | ")
            yield [name, body.format_map(FRAGMENTS), *more]


LAYER_NORMS = [
    pytest.param(body, int((more or ["17"])[0]), id=name) for name, body, *more in _rows("layer norms")
]
RMS_NORMS = [pytest.param(body, id=name) for name, body in _rows("rms norms")]
NORMALIZE = [pytest.param(body, int(size), id=name) for name, body, size in _rows("l2 normalisations")]
BLOCKED: list[Any] = [
    pytest.param(body, output, reason, id=name) for name, body, output, reason in _rows("blocked")
]
NOT_NORMS = [pytest.param(body, more, id=name) for name, body, *more in _rows("no norms")]
