"""What a kernel computes, and estimated times of nodes and of plans, held to numbers that are written out."""

from dataclasses import replace
from typing import Any

import graphs
import numpy as np
import onnx.parser
import pytest
from onnx import NodeProto, helper
from tables import values

from rewriter.ir.float_graph import FloatGraph
from rewriter.ir.plan import SEARCHED, Decision, Plan
from rewriter.target import Target
from rewriter.target.costs import (
    FP32_CHANNEL_US,
    FP32_CONV_US,
    KERNEL_US,
    WAVE_US,
    Prices,
    fp16_us,
    more_us,
    priced,
    products,
)
from rewriter.target.fusion import conv_depth, elementwise_after

Sizes = tuple[int, ...]
Node = tuple[NodeProto, dict[str, Sizes]]


def node(op: str, *shapes: Sizes, **attributes: Any) -> Node:
    """A node with the given shapes: of its inputs, then of its output `y`."""
    names = [f"t{place}" for place in range(len(shapes) - 1)]
    return helper.make_node(op, names, ["y"], **attributes), dict(zip([*names, "y"], shapes, strict=True))


WEIGHT = {"t1"}


@pytest.mark.parametrize(("call", "shapes", "fp16", "more_in_fp32"), graphs.cases("planning/times.txt"))
def test_time_of_a_node(call: str, shapes: str, fp16: str, more_in_fp32: str) -> None:
    parsed = onnx.parser.parse_node(f"y = {call} ()")
    attributes = {item.name: helper.get_attribute_value(item) for item in parsed.attribute}
    sizes = [tuple(map(int, shape.split("x"))) for shape in shapes.split()]
    sized = node(parsed.op_type, *sizes, **attributes)
    assert fp16_us(*sized, WEIGHT) == pytest.approx(float(fp16), rel=1e-3)
    assert more_us(*sized, WEIGHT) == pytest.approx(float(more_in_fp32), rel=1e-3)


@pytest.mark.parametrize("op", ["Relu", "MatMul", "LayerNormalization"])
def test_an_unknown_dimension_counts_as_64(op: str) -> None:
    weights = [(64, 64)] if op == "MatMul" else []
    known, sizes = node(op, (64, 64), *weights, (64, 64))
    unknown = {name: tuple(None if d == 64 else d for d in shape) for name, shape in sizes.items()}
    for time in (fp16_us, more_us):
        assert time(known, unknown, WEIGHT) == time(known, sizes, WEIGHT)
    assert products(node("MatMul", (4, 4), (4, 4), (4, 4))[0], {"y": (128, 128)})[1] == 128 * 128 * 64


@pytest.mark.parametrize(
    ("sized", "tiles"),
    [
        pytest.param(node("MatMul", (2, 3000, 64), (64, 300), (2, 3000, 300)), 47 * 3, id="a batch"),
        pytest.param(node("Conv", (1, 64, 70, 70), (512, 64, 1, 1), (1, 512, 70, 70)), 39 * 4, id="channels"),
        pytest.param(node("MatMul", (40000, 64), (64, 1), (40000, 1)), 313, id="one column"),
        pytest.param(node("MatMul", (64,), (64, 40000), (40000,)), 132, id="a vector: one wave"),
        pytest.param(node("MatMul", (128, 64), (64, 128), (128, 128)), 132, id="one tile: one wave"),
        pytest.param(node("MatMul", (0, 64), (64, 0), (0, 0)), 132, id="nothing: one wave"),
    ],
)
def test_tiles_of_128_rows_and_columns_come_in_waves(sized: Node, tiles: int) -> None:
    assert fp16_us(*sized, WEIGHT) == pytest.approx(KERNEL_US + WAVE_US * 64 * tiles / 132)


# -- plans ----------------------------------------------------------------------------------------
def prices(text: str, target: Target | None = None) -> Prices:
    weights = {name: np.ones((64, 64), np.float32) for name in "uvw"} | {"b": np.ones(64, np.float32)}
    source = graphs.with_weights(text, weights) if "float[64,64] u" in text else graphs.graph(text)
    return priced(source, target)


def plan(*names: str, rule: str = SEARCHED) -> Plan:
    return Plan("fp16", decisions=tuple(Decision("", "", f"0:{name}", rule, "r") for name in names))


def cost(text: str, names: str, rule: str = SEARCHED) -> float:
    """Extra time of the nodes in FP32, without that of their own kernels."""
    times = prices(text)
    own = sum(times.own[f"0:{name}"] for name in names)
    return times.total_us(plan(*names, rule=rule)) - times.total_us(Plan("fp16")) - own


CONVS = """
    g (float[1,4,8,8] x) => (float[1,4,8,8] y)
    <float[4,4,1,1] v = {0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9,1.1,1.2,1.3,1.4,1.5,1.6,1.7},
     float[4,4,1,1] w = {0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9,1.1,1.2,1.3,1.4,1.5,1.6,1.7}, float k = {0.5}> {
        a = Conv(x, v) b = Mul(a, k) c = Relu(b) y = Conv(c, w) }"""
RESIDUAL = CONVS.replace("c = Relu(b)", "c = Add(a, b)")
JOINED = CONVS.replace("c = Relu(b)", "d = Conv(x, w)\n c = Add(a, d)")
SHARED = CONVS.replace("y = Conv(c, w)", "d = Conv(c, w)\n e = Add(d, c)\n y = Neg(e)")
PRODUCT = """
    g (float[8,4] x, float k) => (float[8,4] y)
    <float[4,4] w = {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16}> { a = MatMul(x, w) y = Mul(a, k) }"""

KERNEL = KERNEL_US + 6 * 256 / 4.8e6  # of a kernel that reads and writes a tensor of `CONVS`


@pytest.mark.parametrize(
    ("text", "names", "rule", "us"),
    [
        pytest.param(CONVS, "b", SEARCHED, KERNEL, id="an epilogue of an FP16 Conv is a kernel"),
        pytest.param(CONVS, "c", SEARCHED, KERNEL, id="and so is the end of one"),
        pytest.param(CONVS, "bc", SEARCHED, KERNEL, id="both are one kernel"),
        pytest.param(CONVS, "bc", "unfused-norm", 0.0, id="nodes of the rules are kernels anyway"),
        pytest.param(CONVS, "abc", SEARCHED, KERNEL, id="after an FP32 Conv: a Cast of its input alone"),
        pytest.param(CONVS, "y", SEARCHED, KERNEL, id="a product: a Cast of its operand"),
        pytest.param(CONVS, "abcy", SEARCHED, KERNEL, id="no Cast between FP32 nodes"),
        pytest.param(RESIDUAL, "bc", SEARCHED, KERNEL, id="one kernel for two readers of one Conv"),
        pytest.param(RESIDUAL, "c", SEARCHED, KERNEL, id="the sum alone"),
        pytest.param(JOINED, "c", SEARCHED, KERNEL, id="one kernel after two FP16 Convs"),
        pytest.param(SHARED, "bc", SEARCHED, KERNEL, id="FP16 readers alone: cast where it is made"),
        pytest.param(SHARED, "bce", SEARCHED, 3 * KERNEL, id="FP16 and FP32 readers: a Cast"),
        pytest.param(SHARED, "bce", "epilogue", 0.0, id="Casts of the rules are free"),
        pytest.param(PRODUCT, "y", SEARCHED, 0.0, id="an epilogue of a MatMul is free"),
    ],
)
def test_fp32_costs_kernels_and_casts(text: str, names: str, rule: str, us: float) -> None:
    assert cost(text, names, rule) == pytest.approx(us, abs=1e-9)


def test_casts_of_the_rules_cost_time_where_a_searched_node_reads_them() -> None:
    rules = plan("b", "c", "e", rule="epilogue")
    mixed = replace(rules, decisions=(*rules.decisions[:2], *plan("e").decisions))
    assert prices(SHARED).total_us(mixed) - prices(SHARED).total_us(rules) == pytest.approx(2 * KERNEL)


def test_the_extra_of_a_node_is_what_it_costs_alone() -> None:
    extra = prices(SHARED).extra
    assert extra["0:c"] == pytest.approx(2 * KERNEL), "a kernel of its own, and a Cast for two readers"
    assert extra["0:b"] == pytest.approx(KERNEL), "one reader"
    own = FP32_CHANNEL_US * 4 + FP32_CONV_US * 1024
    assert prices(CONVS).extra["0:y"] == pytest.approx(own + KERNEL), "with the Cast of its operand"
    assert prices(ATTENTION).extra["0:s"] == pytest.approx(16.0)


def test_constants_have_no_price_however_they_are_written() -> None:
    written = CONVS.replace(", float k = {0.5}>", ">").replace(
        "b = Mul", "k = Constant <value = float {0.5}> () b = Mul"
    )
    assert prices(written) == prices(CONVS)


def test_a_node_without_a_price_is_free() -> None:
    """Nodes of subgraphs have none."""
    inner = replace(plan("b"), decisions=(Decision("", "", "1:b", SEARCHED, "r"),))
    assert prices(CONVS).total_us(inner) == prices(CONVS).total_us(Plan("fp16"))


# -- attention ------------------------------------------------------------------------------------
ATTENTION = """
    g (float[8,64,64] q, float[8,64,64] k, float[8,64,64] v) => (float[8,64,64] y) <float h = {0.125}> {
        a = Mul(q, h) t = Transpose<perm = [0,2,1]>(k) s = MatMul(a, t) p = Softmax<axis = -1>(s)
        y = MatMul(p, v) }"""

PROJECTED = """
    g (float[8,64,64] x, float[64,64] u, float[64,64] v, float[64,64] w, float[64] b)
    => (float[8,64,64] y) {
        z = Exp(x)
        m = MatMul(OF, u) q = Add(m, b)
        n = MatMul(x, v) k = Add(n, b)
        o = MatMul(x, w) t = Transpose<perm = [0,2,1]>(k)
        s = MatMul(q, t) p = Softmax<axis = -1>(s)
        y = MatMul(p, o) }"""


@pytest.mark.parametrize("names", ["s", "y", "a", "spy"])
def test_attention_that_is_broken_costs_its_loss_once(names: str) -> None:
    """Between 13 us, measured in a T5 encoder, and 18.5 us in a ViT."""
    assert cost(ATTENTION, names) == pytest.approx(16.0)


def test_nodes_inside_an_attention_take_no_time_of_their_own() -> None:
    times = prices(ATTENTION)
    assert (times.base["0:p"], times.own["0:p"]) == (0.0, 0.0)
    assert times.base["0:a"] > 0.0 and times.own["0:a"] > 0.0, "the scaling of Q is a kernel"
    assert times.own["0:s"] == times.own["0:y"] == 0.0, "the loss is charged for the attention"
    assert times.attentions[0].inside == {"0:p"}
    assert times.attentions[0].nodes == {"0:a", "0:s", "0:y"}, "a view does not break it"
    normed = prices(ATTENTION.replace("a = Mul(q, h)", "r = ReduceL2<axes = [-1]>(q) a = Div(q, r)"))
    assert normed.attentions[0].nodes == {"0:s", "0:y"}, "nor does a norm, which is a kernel before it"


def test_a_large_attention_costs_as_much_as_measured() -> None:
    """139 us for 8 x 12 x 1024 x 1024 x 64, and 332 us more where it is broken."""
    large = prices(ATTENTION.replace("[8,64,64]", "[96,1024,64]"))
    assert large.base["0:s"] + large.base["0:y"] == pytest.approx(139.0, rel=5e-3)
    assert large.attentions[0].us == pytest.approx(332.0, rel=0.02)


@values
def test_the_target_decides_what_breaks_attention(answer: str, name: str, us: float) -> None:
    times = prices(ATTENTION, Target(answers={"attention-islands": answer}))
    assert times.total_us(plan(name)) - times.total_us(Plan("fp16")) == pytest.approx(us)


@values
def test_biases_of_merged_projections_break_attention(read: str, broken_by: str) -> None:
    (attention,) = prices(PROJECTED.replace("OF", read)).attentions
    assert attention.nodes == {f"0:{name}" for name in broken_by}


@pytest.mark.parametrize(("body", "attentions"), graphs.cases("planning/attentions.txt"))
def test_an_attention_is_two_computed_products_with_a_softmax_between(body: str, attentions: str) -> None:
    shape, ones = "float[1,4,4]", ",".join("1" * 16)
    weights = f"float[4,4] w = {{{ones}}}, float[4,4,1] u = {{{ones}}}"
    text = f"g ({shape} q, {shape} k, {shape} v) => ({shape} y) <{weights}> {{ {body} }}"
    assert len(prices(text).attentions) == int(attentions)


@values
def test_products_of_a_conv(op: str, weight: tuple[int, ...], attributes: dict[str, Any], depth: int) -> None:
    assert conv_depth(helper.make_node(op, ["x", "w"], ["y"], **attributes), weight) == depth


WEIGHTS = "<float[4,4] w = {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16}, float k = {0.5}>"


def _neg(node: NodeProto) -> bool:
    return node.op_type == "Neg"


@pytest.mark.parametrize(("body", "nodes"), graphs.cases("planning/elementwise.txt"))
def test_elementwise_nodes_after_a_tensor(body: str, nodes: str) -> None:
    source = graphs.graph(f"g (float[4,4] x) => (float[4,4] y) {WEIGHTS} {{ a = MatMul(x, w) {body} }}")
    found = elementwise_after(FloatGraph.main(source), "a", _neg)
    assert " ".join(node.output[0] for node in found) == nodes


def test_nothing_is_after_an_output() -> None:
    text = f"g (float[4,4] x) => (float[4,4] a, float[4,4] y) {WEIGHTS} {{ a = MatMul(x, w) y = Relu(a) }}"
    assert elementwise_after(FloatGraph.main(graphs.graph(text)), "a") == []
