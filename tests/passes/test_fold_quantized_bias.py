"""fold-quantized-bias: bit-equal to DequantizeLinear on ONNX Runtime, and weights stay."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import apply, graph, ops, random_feeds, run
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from rewriter.model import Model, walk_graphs
from rewriter.passes.fold_quantized_bias import FoldQuantizedBias

CONV = "g (float[1,2,4,4] x, float[3,2,1,1] w) => (float[1,3,4,4] y)"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param(
            CONV
            + """<int32[3] q = {100, -20, 3}, float s = {0.3}> {
                b = DequantizeLinear(q, s) y = Conv(x, w, b) }""",
            ["Conv"],
            id="one scale",
        ),
        pytest.param(
            CONV
            + """<int32[3] q = {100, -20, 3}, float[3] s = {0.3, 0.7, 1.1}, int32[3] z = {0, 0, 0}> {
                b = DequantizeLinear<axis = 0>(q, s, z) y = Conv(x, w, b) }""",
            ["Conv"],
            id="a scale for each channel, zero point zero",
        ),
        pytest.param(
            CONV
            + """<int32[3] q = {100, -20, 3}, float[3] s = {0.3, 0.7, 1.1}> {
                b = DequantizeLinear<axis = -1>(q, s) y = Conv(x, w, b) }""",
            ["Conv"],
            id="a negative axis",
        ),
        pytest.param(
            CONV
            + """<int32[3] q = {100, -20, 3}, float[1] s = {0.3}, int32[1] z = {0}> {
                b = DequantizeLinear(q, s, z) y = Conv(x, w, b) }""",
            ["Conv"],
            id="a vector of one scale counts for the tensor",
        ),
        pytest.param(
            CONV
            + """<int32[3] q = {100, -20, 3}, int32[3] r = {1, 2, 3}, float s = {0.3}> {
                b = DequantizeLinear(q, s) c = DequantizeLinear(r, s)
                h = Conv(x, w, b) k = Conv(x, w, c) y = Add(h, k) }""",
            ["Conv", "Conv", "Add"],
            id="two biases share a scale",
        ),
        pytest.param(
            CONV
            + """<int32[3] q = {100, -20, 3}, float s = {0.3}> {
                i = Identity(q) b = DequantizeLinear(i, s) c = Identity(b) d = Cast<to = 1>(c)
                y = Conv(x, w, d) }""",
            ["Identity", "Cast", "Conv"],
            id="Identity before, Identity and Cast after",
        ),
        pytest.param(
            CONV
            + """{
                q = Constant<value_ints = [100, -20, 3]>() i = Constant<value = int32[3] {7, 8, 9}>()
                s = Constant<value = float {0.3}>() b = DequantizeLinear(i, s) y = Conv(x, w, b) }""",
            ["Conv"],
            id="Constant nodes",
        ),
        pytest.param(
            """g (float[2,3] x) => (float[2,3] y)
            <int32[2,3] q = {1, 2, 3, 4, 5, 6}, float[3] s = {0.1, 0.2, 0.3}> {
                b = DequantizeLinear<axis = 1>(q, s) y = Add(x, b) }""",
            ["Add"],
            id="the last axis of a matrix",
        ),
        pytest.param(
            """g (float[3] x) => (float[3] y, float[3] b) <int32[3] q = {1, 2, 3}, float s = {0.1}> {
                b = DequantizeLinear(q, s) y = Add(x, b) }""",
            ["Identity", "Add"],
            id="the bias is a graph output",
        ),
        pytest.param(
            """g (float[3] x, bool c) => (float[3] y) <int32[3] q = {1, 2, 3}, float s = {0.1}> {
                y = If(c) <then_branch = t () => (float[3] o) { b = DequantizeLinear(q, s) o = Add(x, b) },
                           else_branch = e () => (float[3] p) { p = Identity(x) }> }""",
            ["If"],
            id="in a subgraph, constants outside",
        ),
    ],
)
def test_folded_and_bit_equal(body: str, expected: list[str]) -> None:
    source = graph(body)
    result, report = apply(FoldQuantizedBias(), source)
    assert report.changes
    assert ops(result) == expected
    assert all(n.op_type != "DequantizeLinear" for g in walk_graphs(result.proto.graph) for n in g.node)
    feeds = random_feeds(source)
    for ours, theirs in zip(run(result, feeds), run(source, feeds), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    _, again = apply(FoldQuantizedBias(), result)
    assert not again.changes


int32 = st.integers(-(2**31), 2**31 - 1)
scales = st.floats(2.0**-40, 2.0**20, width=32)


def _only_bias(data: list[int], scale: list[float], opset: int = 17) -> Model:
    body = f"""g (float[{len(data)}] x) => (float[{len(data)}] y) {{
        b = DequantizeLinear<axis = 0>(q, s) y = Mul(x, b) }}"""
    source = graph(body.replace("y) {", "y) <int32[1] q = {0}, float[1] s = {1}> {"), opset=opset)
    del source.proto.graph.initializer[:]
    q, s = np.array(data, np.int32), np.array(scale, np.float32)
    source.proto.graph.initializer.extend([numpy_helper.from_array(q, "q"), numpy_helper.from_array(s, "s")])
    return source


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(int32, scales), min_size=1, max_size=9))
def test_every_int32_and_scale_is_bit_equal(pairs: list[tuple[int, float]]) -> None:
    source = _only_bias([q for q, _ in pairs], [s for _, s in pairs])
    result, _ = apply(FoldQuantizedBias(), source)
    feeds = {"x": np.ones(len(pairs), np.float32)}
    np.testing.assert_array_equal(run(result, feeds)[0], run(source, feeds)[0])


def test_a_float16_scale_gives_a_float16_bias() -> None:
    source = graph(
        """g (float16[3] x) => (float16[3] y)
        <int32[3] q = {100, -20, 3}, float16[3] s = {13517, 14746, 15462}> {
            b = DequantizeLinear<axis = 0>(q, s) y = Add(x, b) }""",
        opset=19,
    )
    result, _ = apply(FoldQuantizedBias(), source)
    feeds = random_feeds(source)
    np.testing.assert_array_equal(run(result, feeds)[0], run(source, feeds)[0])


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        pytest.param(
            """g (float[1,2,4,4] x) => (float[1,3,4,4] y)
            <int8[3,2,1,1] q = {1, 2, 3, 4, 5, 6}, float[3] s = {0.3, 0.7, 1.1}> {
                w = DequantizeLinear<axis = 0>(q, s) y = Conv(x, w) }""",
            "stays quantised",
            id="an int8 weight",
        ),
        pytest.param(
            "g (float[3] x, float[3] s) => (float[3] y) <int32[3] q = {1, 2, 3}> "
            "{ b = DequantizeLinear<axis = 0>(q, s) y = Add(x, b) }",
            "s is computed",
            id="a computed scale",
        ),
        pytest.param(
            "g (int32[3] q) => (float[3] y) <float s = {0.1}> { y = DequantizeLinear(q, s) }",
            "q is computed",
            id="computed int32 values",
        ),
        pytest.param(
            "g (float[3] x) => (float[3] y) <int32[3] q = {1, 2, 3}, float[2] s = {0.1, 0.2}> "
            "{ b = DequantizeLinear<axis = 0>(q, s) y = Add(x, b) }",
            "does not fit axis 0",
            id="a scale of the wrong length",
        ),
    ],
)
def test_declined_with_a_reason(body: str, reason: str) -> None:
    source = graph(body)
    result, report = apply(FoldQuantizedBias(), source)
    assert result.same_as(source)
    assert [reason in r.reason for r in report.refusals] == [True]


def test_blocks_are_declined() -> None:
    source = graph(
        """g (float[2,4] x) => (float[2,4] y)
        <int32[2,4] q = {1, 2, 3, 4, 5, 6, 7, 8}, float[2,2] s = {1, 2, 3, 4}> {
            b = DequantizeLinear<axis = 1, block_size = 2>(q, s) y = Add(x, b) }""",
        opset=21,
        ir=10,
    )
    result, report = apply(FoldQuantizedBias(), source)
    assert result.same_as(source)
    assert "in blocks" in report.refusals[0].reason


def test_activations_are_none_of_its_business() -> None:
    source = graph(
        """g (float[3] x) => (float[3] y) <float s = {0.1}, uint8 z = {128}> {
            q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }"""
    )
    result, report = apply(FoldQuantizedBias(), source)
    assert result.same_as(source)
    assert not report.refusals
