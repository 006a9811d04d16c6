"""The price of a plan depends on the types of neighbouring nodes."""

from __future__ import annotations

from dataclasses import replace

import graphs
import numpy as np
import pytest

from rewriter.hazards.planning.costs.estimate import all_terms, priced
from rewriter.hazards.planning.costs.node_times import LOW_US, MORE_US
from rewriter.hazards.planning.costs.prices import Prices
from rewriter.hazards.planning.planner import SEARCHED
from rewriter.ir.base import Target
from rewriter.ir.model import facts
from rewriter.ir.plan import Decision, Plan


def prices(text: str, target: Target | None = None) -> Prices:
    source = graphs.graph(text)
    return priced(source, facts.infer(source), target)


def plan(*names: str, rule: str = SEARCHED) -> Plan:
    return Plan("fp16", decisions=tuple(Decision("", "", f"0:{name}", rule, "r") for name in names))


CONVS = """
    g (float[1,4,8,8] x) => (float[1,4,8,8] y)
    <float[4,4,1,1] v = {0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9,1.1,1.2,1.3,1.4,1.5,1.6,1.7},
     float[4,4,1,1] w = {0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9,1.1,1.2,1.3,1.4,1.5,1.6,1.7}, float k = {0.5}> {
        a = Conv(x, v)
        b = Mul(a, k)
        c = Relu(b)
        y = Conv(c, w)
    }"""


KERNEL_US = LOW_US["kernel"] + 6 * 256 / 4.8e6
"""Of a kernel that reads and writes a tensor of `CONVS`."""


@pytest.mark.parametrize("names", [("b",), ("c",), ("b", "c")], ids=" ".join)
def test_an_fp32_epilogue_of_an_fp16_conv_is_a_kernel(names: tuple[str, ...]) -> None:
    found = prices(CONVS)
    assert found.own["0:b"] == found.own["0:c"] == 0.0
    assert found.total_us(plan(*names)) - found.total_us(Plan("fp16")) == pytest.approx(KERNEL_US)
    assert found.extra["0:b"] == pytest.approx(KERNEL_US)


def test_an_fp32_epilogue_of_an_fp32_conv_is_free() -> None:
    found = prices(CONVS)
    assert found.total_us(plan("a", "b", "c")) == pytest.approx(found.total_us(plan("a")))


def test_constants_have_no_price_however_they_are_written() -> None:
    written = CONVS.replace(", float k = {0.5}>", ">").replace(
        "b = Mul", "k = Constant <value = float {0.5}> () b = Mul"
    )
    assert prices(written).base == prices(CONVS).base
    assert prices(written).own.keys() == prices(CONVS).own.keys()


def test_a_node_without_a_price_is_free() -> None:
    """Nodes of subgraphs have none."""
    found = prices(CONVS)
    inner = replace(plan("b"), decisions=(Decision("", "", "1:b", SEARCHED, "r"),))
    assert found.total_us(inner) == found.total_us(Plan("fp16"))


TRANSPOSED = CONVS.replace("= Conv(", "= ConvTranspose(")
SHARED = TRANSPOSED.replace("y = ConvTranspose(c, w)", "d = ConvTranspose(c, w)\n e = Add(d, c)\n y = Neg(e)")
BANDWIDTH_US = 6 * 256 / 4.8e6


@pytest.mark.parametrize("names", [("b",), ("b", "c")], ids=" ".join)
def test_an_fp32_epilogue_of_a_conv_transpose_costs_bandwidth(names: tuple[str, ...]) -> None:
    found = prices(TRANSPOSED)
    assert found.total_us(plan(*names)) - found.total_us(Plan("fp16")) == pytest.approx(BANDWIDTH_US)


def test_a_result_with_fp16_and_fp32_consumers_costs_a_cast() -> None:
    """A product in FP16 reads c, and a sum; what one type alone reads is cast where it is made."""
    found = prices(SHARED)
    base = found.total_us(Plan("fp16"))
    assert found.total_us(plan("b", "c", "e")) - base == pytest.approx(2 * BANDWIDTH_US + KERNEL_US)
    assert found.total_us(plan("b", "c")) - base == pytest.approx(BANDWIDTH_US)


def test_casts_of_the_rules_are_free_unless_a_searched_node_reads_them() -> None:
    found = prices(SHARED)
    rules = plan("b", "c", "e", rule="epilogue")
    assert found.total_us(rules) == found.total_us(Plan("fp16"))
    mixed = replace(rules, decisions=(*plan("b", "c", rule="epilogue").decisions, *plan("e").decisions))
    assert found.total_us(mixed) - found.total_us(rules) == pytest.approx(BANDWIDTH_US + KERNEL_US)


def test_fp32_epilogues_of_the_rules_are_free_after_a_conv() -> None:
    found = prices(CONVS)
    assert found.total_us(plan("b", "c", rule="unfused-norm")) == found.total_us(Plan("fp16"))


def test_an_fp32_epilogue_of_a_matrix_product_is_free() -> None:
    found = prices(
        "g (float[8,4] x, float k) => (float[8,4] y)"
        " <float[4,4] w = {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16}> { a = MatMul(x, w) y = Mul(a, k) }"
    )
    assert found.total_us(plan("y")) == found.total_us(Plan("fp16"))


def test_a_product_in_fp32_pays_for_the_cast_before_it_unless_that_is_fp32_too() -> None:
    found = prices(CONVS)
    own, base = MORE_US["channels"] * 4 + MORE_US["conv-products"] * 1024, found.total_us(Plan("fp16"))
    assert found.total_us(plan("y")) - base == pytest.approx(own + KERNEL_US)
    assert found.total_us(plan("a", "b", "c", "y")) - found.total_us(plan("a", "b", "c")) == pytest.approx(
        own
    )
    assert found.extra["0:y"] == pytest.approx(own + KERNEL_US)


BROKEN_ATTENTION_US = 16.0
"""Of a small attention: between 13 us, measured in a T5 encoder, and 18.5 us in a ViT."""

ATTENTION = """
    g (float[8,64,64] q, float[8,64,64] k, float[8,64,64] v) => (float[8,64,64] y) <float h = {0.125}> {
        a = Mul(q, h)
        t = Transpose<perm = [0,2,1]>(k)
        s = MatMul(a, t)
        p = Softmax<axis = -1>(s)
        y = MatMul(p, v)
    }"""


@pytest.mark.parametrize("names", [("s",), ("y",), ("a",), ("s", "p", "y")], ids=" ".join)
def test_attention_that_is_broken_costs_its_loss_once(names: tuple[str, ...]) -> None:
    found = prices(ATTENTION)
    own = sum(found.own[f"0:{name}"] for name in names)
    lost = found.total_us(plan(*names)) - found.total_us(Plan("fp16")) - own
    assert lost == pytest.approx(BROKEN_ATTENTION_US)


PROJECTED = """
    g (float[8,64,64] x, float[64,64] u, float[64,64] v, float[64,64] w, float[64] b)
    => (float[8,64,64] y) {
        z = Exp(x)
        m = MatMul(OF, u) q = Add(m, b)
        n = MatMul(x, v) k = Add(n, b)
        o = MatMul(x, w) t = Transpose<perm = [0,2,1]>(k)
        s = MatMul(q, t) p = Softmax<axis = -1>(s)
        y = MatMul(p, o)
    }"""


@pytest.mark.parametrize(("read", "lost_us"), [("x", BROKEN_ATTENTION_US), ("z", 0.0)], ids=["one", "two"])
def test_a_bias_in_fp32_breaks_attention_whose_projections_read_one_tensor(read: str, lost_us: float) -> None:
    weights = {name: np.ones((64, 64), np.float32) for name in "uvw"} | {"b": np.ones(64, np.float32)}
    source = graphs.with_weights(PROJECTED.replace("OF", read), weights)
    found = priced(source, facts.infer(source))
    assert found.total_us(plan("q")) - found.total_us(Plan("fp16")) == pytest.approx(lost_us)


def test_softmax_alone_in_fp32_is_free_where_the_target_fuses_it() -> None:
    found = prices(ATTENTION)
    assert found.total_us(plan("p")) == found.total_us(Plan("fp16"))
    none = prices(ATTENTION, replace(Target(), answers={"attention-islands": "none"}))
    assert none.total_us(plan("p")) - none.total_us(Plan("fp16")) == pytest.approx(BROKEN_ATTENTION_US)
    fused = prices(ATTENTION, replace(Target(), answers={"attention-islands": "any"}))
    assert fused.total_us(plan("s")) == fused.total_us(Plan("fp16"))


def test_measured_attention_of_a_target_is_its_price() -> None:
    slow = {"FP16": 30.0, "FP32 QK^T and Softmax": 30_030.0}
    found = prices(ATTENTION, replace(Target(), figures={"attention-islands": slow}))
    products = 2 * 8 * 64 * 64 * 64
    assert found.attentions[0].us == pytest.approx(30_000.0 * products / (2 * 12 * 1024 * 1024 * 64))


def test_a_large_attention_loses_its_advantage_with_its_size() -> None:
    """332 us were measured for 8 x 12 x 1024 x 1024 x 64."""
    large = ATTENTION.replace("[8,64,64]", "[96,1024,64]")
    assert prices(large).attentions[0].us == pytest.approx(332.0, rel=0.02)


@pytest.mark.parametrize(
    "seen_us",
    [
        pytest.param({}, id="nothing was timed"),
        pytest.param({"FP32 QK^T and Softmax": 30_000.0}, id="the fused kernel was not timed"),
        pytest.param({"FP16": 0.5}, id="the broken one was not timed"),
        pytest.param({"FP16": 30.0, "FP32 QK^T and Softmax": 30.0}, id="breaking it cost nothing"),
        pytest.param({"FP16": 30.0, "FP32 QK^T and Softmax": 20.0}, id="breaking it was faster"),
    ],
)
def test_timings_that_show_no_loss_leave_the_recorded_one(seen_us: dict[str, float]) -> None:
    seen = {"attention-islands": seen_us}
    large = ATTENTION.replace("[8,64,64]", "[96,1024,64]")
    assert prices(large, replace(Target(), figures=seen)).attentions == prices(large).attentions


def test_nodes_inside_an_attention_take_no_time_of_their_own() -> None:
    found = prices(ATTENTION)
    assert (found.base["0:p"], found.own["0:p"]) == (0.0, 0.0)
    assert found.base["0:a"] > 0.0 and found.own["0:a"] > 0.0, "the scaling of Q is a kernel"
    assert found.own["0:s"] == found.own["0:y"] == 0.0, "the loss is charged for the attention"
    assert found.attentions[0].inside == {"0:p"}
    assert found.attentions[0].nodes == {"0:a", "0:s", "0:y"}, "a view does not break it"


def test_a_fit_gets_the_terms_of_all_kernels() -> None:
    source = graphs.graph(ATTENTION)
    found = list(all_terms(source, facts.infer(source)))
    assert [sorted(one) for one in found] == [
        ["moved", "norm"],
        [],
        ["attention", "ragged"],
        ["attention", "ragged"],
    ], "the scaling, a view, and both products; the Softmax is a part of these"


@pytest.mark.parametrize(
    ("body", "attentions"),
    [
        pytest.param("s = MatMul(q, k) p = Softmax(s) y = MatMul(p, v)", 1, id="attention"),
        pytest.param("s = MatMul(q, k) m = Add(s, v) p = Softmax(m) y = MatMul(p, v)", 1, id="a mask"),
        pytest.param("s = MatMul(q, k) p = Relu(s) y = MatMul(p, v)", 0, id="no Softmax"),
        pytest.param("s = Add(q, k) p = Softmax(s) y = MatMul(p, v)", 0, id="scores of no product"),
        pytest.param("s = MatMul(q, w) p = Softmax(s) y = MatMul(p, v)", 0, id="scores of a weight"),
        pytest.param("s = MatMul(q, k) p = Softmax(s) y = MatMul(p, w)", 0, id="values that are weights"),
        pytest.param(
            "s = MatMul(q, k) c = Conv(s, u) p = Softmax(c) y = MatMul(p, v)", 0, id="a Conv between"
        ),
    ],
)
def test_an_attention_is_two_computed_products_with_a_softmax_between(body: str, attentions: int) -> None:
    shape, ones = "float[1,4,4]", ",".join("1" * 16)
    weights = f"float[4,4] w = {{{ones}}}, float[4,4,1] u = {{{ones}}}"
    source = graphs.graph(f"g ({shape} q, {shape} k, {shape} v) => ({shape} y) <{weights}> {{ {body} }}")
    assert len(priced(source, facts.infer(source)).attentions) == attentions


def test_a_bias_of_a_projection_of_its_own_breaks_nothing() -> None:
    """K and V read one tensor, Q another; neither of the sums of Q breaks the attention."""
    weights = {name: np.ones((64, 64), np.float32) for name in "uvw"} | {"b": np.ones(64, np.float32)}
    source = graphs.with_weights(PROJECTED.replace("OF", "z"), weights)
    (attention,) = priced(source, facts.infer(source)).attentions
    assert attention.nodes == {"0:k", "0:s", "0:y"}


def test_only_a_constant_or_another_type_of_reader_makes_a_result_shared() -> None:
    found = prices(SHARED)
    assert found.shared.keys() == {"0:c"}
    assert found.shared["0:c"].readers == {"0:d", "0:e"}
    assert found.shared["0:c"].us == pytest.approx(KERNEL_US)


def test_the_extra_of_a_node_is_what_it_costs_alone() -> None:
    found = prices(SHARED)
    assert found.extra["0:c"] == pytest.approx(2 * KERNEL_US), "a kernel of its own, and a Cast"
    assert found.extra["0:b"] == pytest.approx(BANDWIDTH_US), "one reader"
    assert prices(ATTENTION).extra["0:s"] == pytest.approx(BROKEN_ATTENTION_US)


RESIDUAL = CONVS.replace("c = Relu(b)", "c = Add(a, b)")


def test_epilogues_know_the_convs_and_the_epilogues_that_they_read() -> None:
    found = prices(RESIDUAL).conv_epilogues
    assert {key: (set(one.convs), set(one.nodes)) for key, one in found.items()} == {
        "0:b": ({"0:a"}, set()),
        "0:c": ({"0:a"}, {"0:b"}),
    }


@pytest.mark.parametrize(
    ("names", "kernels"),
    [
        pytest.param(("b", "c"), 1, id="one kernel for both, which read one Conv"),
        pytest.param(("c",), 1, id="the sum alone"),
        pytest.param(("a", "b", "c"), 0, id="the Conv is FP32, too"),
    ],
)
def test_fp32_epilogues_of_one_conv_are_one_kernel(names: tuple[str, ...], kernels: int) -> None:
    found = prices(RESIDUAL)
    conv = found.total_us(plan("a")) - found.total_us(Plan("fp16")) if "a" in names else 0.0
    lost = found.total_us(plan(*names)) - found.total_us(Plan("fp16")) - conv
    assert lost == pytest.approx(kernels * KERNEL_US)
