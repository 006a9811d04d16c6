"""Norms as exporters write them, for tests."""

from __future__ import annotations

import pytest
from graphs import graph

from rewriter.ir.graph import open_graphs
from rewriter.ir.model import Model, facts
from rewriter.ir.patterns.norms import Norm, find_norms

INPUTS = "float[2,4,8] x, float[8] s, float[8] b"

CONSTANTS = (
    "<float two = {2.0}, float one = {1.0}, float zero = {0.0}, float half = {0.5}, "
    "float minus_half = {-0.5}, float eps = {0.00001}, float tiny = {1e-12}, float eight = {8.0}, "
    "float eighth = {0.125}, int64[1] last = {-1}>"
)


def units(source: Model) -> list[Norm]:
    """The norms of all graphs of a model."""
    return [n for g in open_graphs(source, facts.infer(source)) for n in find_norms(g)]


def build(body: str, inputs: str = INPUTS, output: str = "float[2,4,8] y", opset: int = 17) -> Model:
    return graph(f"g ({inputs}) => ({output}) {CONSTANTS} {{ {body} }}", opset=opset)


MEAN = "m = ReduceMean<axes = [-1]>(x)"

VARIANCE = f"{MEAN} d = Sub(x, m) q = Pow(d, two) v = ReduceMean<axes = [-1]>(q)"

CORE = f"{VARIANCE} e = Add(v, eps) r = Sqrt(e) n = Div(d, r)"

AFFINE = "w = Mul(n, s) y = Add(w, b)"

FLAX = (
    "w = Constant<value_ints = [2, 4, 1]>() t = ReduceSum<keepdims = 0>(x, last) c = Mul(t, eighth)"
    " q = Mul(x, x) u = ReduceSum<keepdims = 0>(q, last) a = Mul(u, eighth) p = Mul(c, c) g = Sub(a, p)"
    " v = Max(zero, g) j = Reshape(v, w) k = Expand(j, w) e = Add(k, eps) r = Sqrt(e) h = Reciprocal(r)"
    " l = Reshape(c, w) m = Expand(l, w) d = Sub(x, m)"
)

FACTOR = "e = Add(v, eps) r = Sqrt(e) i = Reciprocal(r) f = Mul(i, s)"

LAYER_NORMS = [
    pytest.param(f"{CORE} {AFFINE}", 17, id="as the classic exporter writes it"),
    pytest.param(
        f"{MEAN} d = Sub(x, m) c = Sub(x, m) q = Pow(d, two) v = ReduceMean<axes = [-1]>(q)"
        f" e = Add(v, eps) r = Sqrt(e) n = Div(c, r) {AFFINE}",
        17,
        id="the two Subs are not shared",
    ),
    pytest.param(
        f"{MEAN} k = ReduceMean<axes = [-1]>(x) d = Sub(x, m) c = Sub(x, k) q = Mul(d, c)"
        f" v = ReduceMean<axes = [-1]>(q) e = Add(v, eps) r = Sqrt(e) n = Div(c, r) {AFFINE}",
        17,
        id="neither are the means",
    ),
    pytest.param(
        f"{MEAN} d = Sub(x, m) q = Mul(d, d) v = ReduceMean<axes = [-1]>(q) e = Add(v, eps) r = Sqrt(e)"
        f" n = Div(d, r) {AFFINE}",
        17,
        id="Mul(d, d) for Pow",
    ),
    pytest.param(
        f"{VARIANCE} e = Add(v, eps) r = Sqrt(e) i = Reciprocal(r) n = Mul(d, i) {AFFINE}",
        17,
        id="times Reciprocal(Sqrt)",
    ),
    pytest.param(
        f"{VARIANCE} e = Add(v, eps) r = Sqrt(e) i = Div(one, r) n = Mul(i, d) {AFFINE}",
        17,
        id="times 1 / Sqrt",
    ),
    pytest.param(
        f"{VARIANCE} e = Add(v, eps) i = Pow(e, minus_half) n = Mul(d, i) {AFFINE}", 17, id="times Pow(-0.5)"
    ),
    pytest.param(
        f"{VARIANCE} e = Add(eps, v) r = Pow(e, half) n = Div(d, r) w = Mul(s, n) y = Add(b, w)",
        17,
        id="operands swapped, Pow(0.5) for Sqrt",
    ),
    pytest.param(
        f"i = Identity(eps) j = Identity(i) {VARIANCE} e = Add(v, j) r = Sqrt(e) n = Div(d, r) {AFFINE}",
        17,
        id="epsilon through Identities",
    ),
    pytest.param(
        f"t = Constant<value_int = 2>() {MEAN} d = Sub(x, m) q = Pow(d, t) v = ReduceMean<axes = [-1]>(q)"
        f" e = Add(v, eps) r = Sqrt(e) n = Div(d, r) {AFFINE}",
        17,
        id="an integer exponent",
    ),
    pytest.param(
        f"{MEAN} d = Sub(x, m) f = Cast<to = 1>(d) q = Pow(f, two) v = ReduceMean<axes = [-1]>(q)"
        f" e = Add(v, eps) r = Sqrt(e) g = Cast<to = 1>(r) n = Div(d, g) o = Cast<to = 1>(n)"
        " w = Mul(o, s) z = Identity(w) y = Add(z, b)",
        17,
        id="Casts and Identities that do nothing",
    ),
    pytest.param(
        "m = ReduceMean(x, last) d = Sub(x, m) q = Pow(d, two) v = ReduceMean(q, last) e = Add(v, eps)"
        f" r = Sqrt(e) n = Div(d, r) {AFFINE}",
        18,
        id="axes as an input",
    ),
    pytest.param(
        "t = ReduceSum(x, last) m = Div(t, eight) d = Sub(x, m) q = Pow(d, two) u = ReduceSum(q, last)"
        f" v = Mul(u, eighth) e = Add(v, eps) r = Sqrt(e) n = Div(d, r) {AFFINE}",
        17,
        id="means as sums over their count",
    ),
    pytest.param(
        "k = ReduceMean<axes = [-1], keepdims = 0>(x) m = Unsqueeze(k, last) d = Sub(x, m) q = Pow(d, two)"
        " v = ReduceMean<axes = [-1], keepdims = 0>(q) e = Add(v, eps) r = Sqrt(e) h = Unsqueeze(r, last)"
        f" n = Div(d, h) {AFFINE}",
        17,
        id="reduced axes dropped and put back",
    ),
    pytest.param(
        f"{MEAN} d = Sub(x, m) q = ReduceSumSquare<axes = [-1]>(d) v = Div(q, eight) e = Add(v, eps)"
        f" r = Sqrt(e) n = Div(d, r) {AFFINE}",
        17,
        id="ReduceSumSquare over the count",
    ),
    pytest.param(
        f"{VARIANCE} p = Relu(v) e = Add(p, eps) r = Sqrt(e) n = Div(d, r) {AFFINE}",
        17,
        id="a variance kept from being negative",
    ),
    pytest.param(
        f"{VARIANCE} g = Mul(s, d) e = Add(v, eps) r = Sqrt(e) n = Div(g, r) y = Add(n, b)",
        17,
        id="scaled before it is divided",
    ),
    pytest.param(
        f"h = Constant<value_ints = [2, 4, 8]>() {VARIANCE} e = Add(v, eps) r = Sqrt(e) o = Expand(r, h)"
        f" n = Div(d, o) {AFFINE}",
        17,
        id="a statistic expanded to the size of the input",
    ),
    pytest.param(
        f"q = Mul(x, x) a = ReduceMean<axes = [-1]>(q) {MEAN} p = Mul(m, m) v = Sub(a, p)"
        f" e = Add(v, eps) r = Sqrt(e) d = Sub(x, m) n = Div(d, r) {AFFINE}",
        17,
        id="a variance as E[x^2] - E[x]^2",
    ),
    pytest.param(f"{FLAX} i = Mul(h, s) n = Mul(d, i) y = Add(n, b)", 17, id="Flax"),
    pytest.param(f"{FLAX} i = Mul(s, h) n = Mul(i, d) y = Add(b, n)", 17, id="Flax, operands swapped"),
    pytest.param(
        f"{VARIANCE} {FACTOR} o = Mul(m, f) k = Sub(b, o) n = Mul(x, f) y = Add(n, k)",
        17,
        id="tf.nn.batch_normalization, as Keras 2 calls it",
    ),
    pytest.param(
        f"q = Mul(x, x) a = ReduceMean<axes = [-1]>(q) {MEAN} p = Mul(m, m) v = Sub(a, p) {FACTOR}"
        " u = Neg(m) o = Mul(u, f) k = Add(o, b) n = Mul(x, f) y = Add(n, k)",
        17,
        id="Keras 3",
    ),
    pytest.param(
        f"{VARIANCE} {FACTOR} n = Mul(x, f) o = Mul(m, f) c = Sub(n, o) y = Add(c, b)",
        17,
        id="scaled on both sides of the difference",
    ),
    pytest.param(
        f"m = GlobalAveragePool(x) d = Sub(x, m) q = Mul(d, d) v = GlobalAveragePool(q) {FACTOR}"
        " o = Mul(m, f) k = Sub(b, o) n = Mul(x, f) y = Add(n, k)",
        17,
        id="GlobalAveragePool for ReduceMean, as tf2onnx writes it",
    ),
]
"""Body and opset; LayerNorm of x over the last axis with epsilon `eps`, scale `s` and bias `b`."""

POWER = "q = Pow(x, two) v = ReduceMean<axes = [-1]>(q) e = Add(v, eps) r = Sqrt(e)"

RMS_NORMS = [
    pytest.param(f"{POWER} i = Div(one, r) n = Mul(x, i) y = Mul(s, n)", id="T5, classic exporter"),
    pytest.param(f"{POWER} i = Reciprocal(r) n = Mul(x, i) y = Mul(n, s)", id="Llama, dynamo exporter"),
    pytest.param(f"{POWER} n = Div(x, r) y = Mul(n, s)", id="x over the root"),
    pytest.param(
        f"c = Cast<to = 1>(x) {POWER.replace('(x', '(c')} i = Reciprocal(r) n = Mul(i, c) y = Mul(s, n)",
        id="a Cast before it that does nothing",
    ),
    pytest.param(
        "q = Mul(x, x) v = ReduceMean<axes = [-1]>(q) e = Add(eps, v) i = Pow(e, minus_half)"
        " n = Mul(i, x) y = Mul(s, n)",
        id="Mul(x, x) and Pow(-0.5)",
    ),
    pytest.param(
        "q = ReduceSumSquare<axes = [-1]>(x) v = Mul(q, eighth) e = Add(eps, v) r = Sqrt(e)"
        " n = Div(x, r) y = Mul(s, n)",
        id="a sum of squares over the count",
    ),
    pytest.param(f"{POWER} i = Reciprocal(r) f = Mul(i, s) y = Mul(x, f)", id="Flax, scaled inverse"),
]
"""Bodies; RMSNorm of x over the last axis with epsilon `eps` and scale `s`."""

NORMALIZE = [
    pytest.param(
        "q = Pow(x, two) t = ReduceSum(q, last) r = Pow(t, half) c = Clip(r, tiny) h = Shape(x)"
        " w = Expand(c, h) y = Div(x, w)",
        6,
        id="F.normalize: Pow, ReduceSum, Pow(0.5), Clip, Expand, Div",
    ),
    pytest.param(
        "q = Mul(x, x) t = ReduceSum(q, last) r = Sqrt(t) c = Max(r, tiny) y = Div(x, c)",
        5,
        id="Max for Clip",
    ),
    pytest.param("r = ReduceL2<axes = [-1]>(x) c = Clip(r, tiny) y = Div(x, c)", 3, id="ReduceL2"),
    pytest.param(
        "q = Mul(x, x) t = ReduceSum(q, last) e = Add(t, tiny) r = Sqrt(e) y = Div(x, r)",
        5,
        id="epsilon under the root",
    ),
    pytest.param(
        "r = ReduceL2<axes = [-1]>(x) k = Mul(r, eighth) c = Clip(k, tiny) y = Div(x, c)",
        4,
        id="a root times a constant",
    ),
    pytest.param(
        "q = Mul(x, x) t = ReduceSum(q, last) i = Pow(t, half) o = Cast<to = 1>(i) c = Clip(o, tiny)"
        " j = Reciprocal(c) y = Mul(x, j)",
        7,
        id="times the reciprocal",
    ),
]

BLOCKED = [
    pytest.param(
        "m = ReduceMean<axes = [-1]>(x) d = Sub(x, m) q = Pow(d, two) v = ReduceMean<axes = [1]>(q)"
        f" e = Add(v, eps) r = Sqrt(e) n = Div(d, r) {AFFINE}",
        "float[2,4,8] y",
        "its two means run over different axes",
        id="unequal axes",
    ),
    pytest.param(
        f"{CORE} {AFFINE}",
        "float[2,4,8] y, float[2,4,1] m",
        "m inside it is a graph output",
        id="the mean is an output",
    ),
    pytest.param(
        f"{CORE} {AFFINE} z = Relu(d)",
        "float[2,4,8] y, float[2,4,8] z",
        "d inside it is also used by Relu(z)",
        id="the difference is used elsewhere",
    ),
    pytest.param(
        f"{CORE} {AFFINE}",
        "float[2,4,8] y, float[2,4,8] n",
        "n is used before and after Mul(w)",
        id="an output before the scale",
    ),
    pytest.param(
        f"{CORE} {AFFINE} z = Relu(w)",
        "float[2,4,8] y, float[2,4,8] z",
        "w is used before and after Add(y)",
        id="used before the bias",
    ),
    pytest.param(
        f"k = Constant<value_floats = [1.0, 2.0, 3.0, 4.0]>() j = Unsqueeze(k, last) {CORE} y = Mul(n, j)",
        "float[2,4,8] y",
        "its scale j has shape [4, 1], not that of the normalised axes",
        id="a scale per token",
    ),
    pytest.param(
        "k = Constant<value_floats = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]>()"
        f" t = Constant<value_ints = [0, 1, 2]>() j = Unsqueeze(k, t) {CORE} y = Mul(n, j)",
        "float[1,2,4,8] y",
        "its scale j has shape [1, 1, 1, 8]",
        id="a scale that adds an axis",
    ),
    pytest.param(
        f"k = Constant<value_ints = [4, 1]>() i = Expand(one, k) {VARIANCE} g = Mul(d, i) e = Add(v, eps)"
        " r = Sqrt(e) n = Div(g, r) y = Add(n, b)",
        "float[2,4,8] y",
        "its scale i has shape [4, 1]",
        id="a computed scale per token, before the division",
    ),
    pytest.param(
        f"k = Constant<value_floats = [1.0, 2.0, 3.0, 4.0]>() j = Unsqueeze(k, last) {VARIANCE}"
        " e = Add(v, eps) r = Sqrt(e) i = Div(one, r) f = Mul(i, j) o = Mul(m, f) c = Sub(b, o)"
        " n = Mul(x, f) y = Add(n, c)",
        "float[2,4,8] y",
        "its scale j has shape [4, 1]",
        id="a factor per token, as Keras normalises instances",
    ),
    pytest.param(
        f"{VARIANCE} r = Sqrt(v) e = Add(r, eps) n = Div(d, e) {AFFINE}",
        "float[2,4,8] y",
        "its epsilon is outside the root",
        id="epsilon outside the root",
    ),
    pytest.param(
        f"{VARIANCE} e = Max(v, eps) r = Sqrt(e) n = Div(d, r) {AFFINE}",
        "float[2,4,8] y",
        "its epsilon is a lower bound",
        id="epsilon as a bound",
    ),
    pytest.param(
        f"{VARIANCE} a = Add(v, eps) e = Add(a, tiny) r = Sqrt(e) n = Div(d, r) {AFFINE}",
        "float[2,4,8] y",
        "more than one epsilon",
        id="two epsilons",
    ),
    pytest.param(
        "c = Constant<value_float = 7.0>() m = ReduceMean<axes = [-1]>(x) d = Sub(x, m) q = Pow(d, two)"
        f" t = ReduceSum(q, last) v = Div(t, c) e = Add(v, eps) r = Sqrt(e) n = Div(d, r) {AFFINE}",
        "float[2,4,8] y",
        "not divided by their number",
        id="the unbiased variance",
    ),
    pytest.param(
        f"h = Size(x) c = Cast<to = 1>(h) {VARIANCE} u = Div(v, c) e = Add(u, eps) r = Sqrt(e)"
        f" n = Div(d, r) {AFFINE}",
        "float[2,4,8] y",
        "not divided by their number",
        id="a factor known at run time only",
    ),
    pytest.param(
        "t = ReduceSum(x, last) d = Sub(x, t) q = Pow(d, two) v = ReduceMean<axes = [-1]>(q)"
        f" e = Add(v, eps) r = Sqrt(e) n = Div(d, r) {AFFINE}",
        "float[2,4,8] y",
        "what is subtracted is not the mean",
        id="a sum subtracted",
    ),
    pytest.param(
        f"{VARIANCE} h = Cast<to = 10>(v) f = Cast<to = 1>(h) e = Add(f, eps) r = Sqrt(e)"
        f" n = Div(d, r) {AFFINE}",
        "float[2,4,8] y",
        "rounded to a narrower type",
        id="a rounding Cast inside",
    ),
    pytest.param(
        f"k = Constant<value_ints = [3, 2, 4, 1]>() {VARIANCE} e = Add(v, eps) r = Sqrt(e)"
        f" o = Expand(r, k) n = Div(d, o) {AFFINE}",
        "float[3,2,4,8] y",
        "expanded",
        id="an Expand beyond the input",
    ),
]

CHANNEL = "m = ReduceMean<axes = [1]>(x) d = Sub(x, m) q = Pow(d, two) v = ReduceMean<axes = [1]>(q)"
