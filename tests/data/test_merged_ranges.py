"""Ranges of merged products, taken from their parts, beside what a run measures."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import graph
from paths import MODELS

from rewriter.ir.base import Context
from rewriter.ir.graph.editor import TAG
from rewriter.ir.model import Model, facts, load
from rewriter.pipeline.driver import Driver
from rewriter.pipeline.text import parse
from rewriter.runtime.inputs import load_samples
from rewriter.runtime.ranges import Ranges, measure
from rewriter.runtime.ranges.merged import merged_ranges

TAGS = {"merge-projections"}


def measured(model: Model, feeds: list[dict[str, np.ndarray]]) -> Ranges:
    return measure(model, feeds, facts.infer(model))


def merged(model: Model) -> Model:
    return Driver().run(model, parse("merge-projections"), Context())[0]


@pytest.mark.parametrize("name", ["vit", "bert", "swin", "t5_encoder", "llama_block"])
def test_derived_ranges_equal_measured_ones(name: str) -> None:
    source = Driver().run(load(MODELS / f"{name}.onnx"), parse("upgrade-opset,simplify"), Context())[0]
    feeds = [dict(sample) for sample in load_samples(MODELS / f"{name}.npz", source)]
    result = merged(source)
    found = merged_ranges(result, measured(source, feeds), TAGS, facts.infer(result))
    assert found is not None
    ran = measured(result, feeds)
    new = ran.keys() - measured(source, feeds).keys()
    assert len(new) >= 4
    assert ran.keys() <= found.keys()
    for key in new:
        slack = 1e-5 * ran[key].absmax  # ONNX Runtime may block the sums otherwise
        assert found[key].low <= ran[key].low + slack
        assert found[key].high >= ran[key].high - slack
        assert found[key].mean_abs == pytest.approx(ran[key].mean_abs, rel=0.5)


APART = """
    g (float[2,2] x) => (float[2,2] q, float[2,2] k)
    <float[2,2] a = {1,0, 0,1}, float[2,2] b = {2,0, 0,2}, float[2] c = {-1,3}> {
        m = MatMul(x, a)
        q = Add(m, c)
        k = MatMul(x, b)
    }"""


def test_a_product_lies_within_the_sum_minus_the_bias() -> None:
    source = graph(APART)
    feeds: list[dict[str, np.ndarray]] = [{"x": np.array([[1, 2], [-3, 4]], np.float32)}]
    result = merged(source)
    before = measured(source, feeds)
    found = merged_ranges(result, before, TAGS, facts.infer(result))
    assert found is not None
    product, add, split = result.proto.graph.node
    biased, own = found[0, add.output[0]], found[0, product.output[0]]
    assert split.input[0] == add.output[0]
    assert (biased.low, biased.high) == (-6.0, 8.0)
    assert (own.low, own.high) == (-9.0, 9.0)


def test_unmeasured_parts_give_no_ranges() -> None:
    source = graph(APART)
    before = measured(source, [{"x": np.ones((2, 2), np.float32)}])
    del before[0, "k"]
    result = merged(source)
    assert merged_ranges(result, before, TAGS, facts.infer(result)) is None


def test_views_have_the_range_of_what_they_show() -> None:
    """keep-epilogues puts norms and Transposes between views: nothing new is computed."""
    source = graph("""
        g (float[2,4,4] x) => (float[2,4,4] y, float[4,4,2] z)
        <float[4,4] w = {1,0,0,0, 0,2,0,0, 0,0,3,0, 0,0,0,4},
         float[4] s = {1,2,3,4}, float[4] b = {1,1,1,2}> {
            m = MatMul(x, w)
            a = Add(m, b)
            y = LayerNormalization(a, s, b)
            n = MatMul(x, w)
            d = Add(n, b)
            z = Transpose<perm = [1, 2, 0]>(d)
        }""")
    feeds = [{"x": np.random.default_rng(3).standard_normal((2, 4, 4)).astype(np.float32)}]
    result, reports = Driver().run(source, parse("keep-epilogues"), Context())
    assert len(reports[0].changes) == 2
    found = merged_ranges(result, measured(source, feeds), {"keep-epilogues"}, facts.infer(result))
    ran = measured(result, feeds)
    assert found is not None
    for key, expected in ran.items():
        assert (found[key].low, found[key].high) == (expected.low, expected.high)
        assert found[key].mean_abs == pytest.approx(expected.mean_abs)
    assert len(ran) == len(measured(source, feeds)) + 4


def test_a_made_tensor_without_a_range_is_measured() -> None:
    source = graph("g (float[2,2] x) => (float[2,2] y) { h = Relu(x)  y = Tanh(h) }")
    source.proto.graph.node[0].metadata_props.add(key=TAG, value="someone")
    assert merged_ranges(source, Ranges(), {"someone"}, facts.infer(source)) is None


SCALED = """
    g (float[1,3,2] x) => (float[1,3,2,1] q, float[1,3,2,1] k)
    <float[2,2] a = {1,-2, 0.5,3}, float[2,2] b = {2,0, 1,-1}, float f = {FACTOR}, int64[4] s = {1,3,2,1}> {
        m = MatMul(x, a)
        p = Mul(m, f)
        q = Reshape(p, s)
        n = MatMul(x, b)
        k = Reshape(n, s)
    }"""


def test_a_part_has_the_range_of_its_scaled_values_divided_by_the_scale() -> None:
    """Q times a factor before its Reshape, as Whisper and BART write it."""
    feeds: list[dict[str, np.ndarray]] = [{"x": np.array([[[1, 2], [-3, 4], [0, -1]]], np.float32)}]
    source = graph(SCALED.replace("FACTOR", "-0.3"))
    result = merged(source)
    found, ran = (
        merged_ranges(result, measured(source, feeds), TAGS, facts.infer(result)),
        measured(result, feeds),
    )
    assert found is not None and ran.keys() <= found.keys()
    (split,) = (node for node in result.proto.graph.node if node.op_type == "Split")
    for name in split.output:
        assert (found[0, name].low, found[0, name].high) == pytest.approx(
            (ran[0, name].low, ran[0, name].high)
        )
        assert found[0, name].mean_abs == pytest.approx(ran[0, name].mean_abs)
    lost = graph(SCALED.replace("FACTOR", "0"))
    assert merged_ranges(merged(lost), measured(lost, feeds), TAGS, facts.infer(merged(lost))) is None
