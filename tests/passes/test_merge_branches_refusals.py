"""merge-branches: Convs that stay apart, with the reasons; other types than FP32."""

from __future__ import annotations

import numpy as np
import pytest
from branched import SAME, SIX, WIDE, declined, merged, model, typed
from graphs import graph, ops
from onnx import TensorProto

from rewriter.base import Kept

SILENT = [
    pytest.param(f"p = {WIDE}(x, w3) r = Relu(x) q = Conv(r, w1) y = Add(p, q)", id="of other tensors"),
    pytest.param(f"p = {WIDE}(x, w3) q = Conv(x, w1) r = Relu(q) y = Add(p, r)", id="something between"),
    pytest.param(f"p = {WIDE}(x, w3) y = Add(p, p)", id="one Conv twice"),
    pytest.param(f"p = {WIDE}(x, w3) q = Conv(x, w1) y = Sum(p, q, p)", id="one Conv twice, and another"),
    pytest.param(f"p = {WIDE}(x, w3) q = Conv(x, w1) y = Mul(p, q)", id="no sum"),
    pytest.param(f"p = {WIDE}(x, w3) y = Sum(p)", id="Sum of one"),
    pytest.param(f"p = {WIDE}(x, w3) n = Neg(w1) q = Conv(x, n) y = Add(p, q)", id="a computed weight"),
    pytest.param("p = Conv<group = 6, pads = [1, 1, 1, 1]>(x, d3) y = Add(p, x)", id="an identity"),
]


@pytest.mark.parametrize("body", SILENT)
def test_skipped(body: str) -> None:
    before = model(body, SIX if "d3" in body else "float[2,3,6,7] x")
    after, report = merged(before)
    assert after is before
    assert not report.refusals


PAIR = f"p = {WIDE}(x, w3, a) q = Conv(x, w1, b) y = Add(p, q)"
WIDER = "p = Conv<pads = [2, 2, 2, 2]>(x, w5)"
DECLINED = [
    pytest.param(
        f"p = {WIDE}(x, w3) q = Conv<strides = [6, 7]>(x, w1) y = Add(p, q)",
        "different strides",
        id="strides",
    ),
    pytest.param(
        f"p = {WIDE}(x, w3) q = Conv(x, one) y = Add(p, q)", "different numbers of channels", id="channels"
    ),
    pytest.param(
        f"p = Conv<dilations = [2, 2], pads = [2, 2, 2, 2]>(x, w3) q = {WIDE}(x, v3) y = Add(p, q)",
        "different dilations",
        id="dilations",
    ),
    pytest.param(
        "p = Conv<pads = [0, 1, 0, 1]>(x, w13) q = Conv<pads = [1, 0, 1, 0]>(x, w31) y = Add(p, q)",
        "none holds the other",
        id="a row and a column",
    ),
    pytest.param(
        "p = Conv<pads = [0, 1, 2, 1]>(x, w3) q = Conv<pads = [1, 0, 1, 0]>(x, w31) y = Add(p, q)",
        "none holds the other",
        id="before the window",
    ),
    pytest.param(
        "p = Conv<pads = [2, 1, 0, 1]>(x, w3) q = Conv<pads = [1, 0, 1, 0]>(x, w31) y = Add(p, q)",
        "none holds the other",
        id="after the window",
    ),
    pytest.param(
        "p = Conv<dilations = [2, 2], pads = [1, 2, 3, 2]>(x, w3) q = Conv(x, w1) y = Add(p, q)",
        "none holds the other",
        id="between the elements of a dilated window",
    ),
    pytest.param(f"{PAIR} z = Relu(p)", "p has other consumers", id="a result with other consumers"),
]


@pytest.mark.parametrize(("body", "reason"), DECLINED)
def test_declined(body: str, reason: str) -> None:
    declined(model(body), reason)


def test_other_groups_are_declined() -> None:
    before = model("p = Conv<group = 2>(x, g1) q = Conv<group = 6>(x, d1) y = Add(p, q)", SIX)
    declined(before, "different groups")


def test_a_result_that_is_an_output_stays() -> None:
    declined(model(PAIR, outputs="float[N,C,P,Q] y, float[N,C,P,Q] q"), "q has other consumers")


def test_results_of_other_sizes_which_add_broadcasts_are_declined() -> None:
    body = f"{WIDER} q = Conv(x, w3) y = Add(p, q)"
    declined(model(body, "float[2,3,3,3] x"), "may have results of different sizes")


def test_results_whose_sizes_are_not_known_are_declined() -> None:
    body = (
        "p = Conv<strides = [2, 2], pads = [1, 1, 0, 1]>(x, w3) q = Conv<strides = [2, 2]>(x, w1)"
        " y = Add(p, q)"
    )
    declined(model(body, "float[N,3,H,W] x"), "may have results of different sizes")


def test_auto_pad_by_sizes_that_are_not_known_is_declined() -> None:
    same = SAME.format("UPPER", 2, 2)
    before = model(f"p = {same}(x, w3) q = {same}(x, w1) y = Add(p, q)", "float[N,3,H,W] x")
    declined(before, "its auto_pad depends on unknown sizes of x")


def test_a_computed_bias_is_declined() -> None:
    before = model("p = Conv(x, w1, a) n = Neg(b) q = Conv(x, v1, n) y = Add(p, q)")
    declined(before, "its bias is computed")


KEPT = [
    pytest.param(Kept(("wide",)), id="the large one"),
    pytest.param(Kept(("q",)), id="the small one by its output"),
    pytest.param(Kept(("y",)), id="the sum"),
    pytest.param(Kept(ops=("Conv",)), id="by the operator"),
]


@pytest.mark.parametrize("kept", KEPT)
def test_nodes_that_the_user_keeps_in_fp32_stay_apart(kept: Kept) -> None:
    declined(model(f"[wide] {PAIR}"), "is kept in FP32 by", kept=kept)


def test_other_convs_merge_beside_kept_ones() -> None:
    other = f"r = {WIDE}(x, v3) s = Conv(x, v1) z = Add(r, s)"
    before = model(f"[wide] {PAIR} {other}", outputs="float[N,C,P,Q] y, float[N,C,P,Q] z")
    after, report = merged(before, kept=Kept(("wide",)))
    assert ops(after).count("Conv") == 3
    assert (len(report.changes), len(report.refusals)) == (1, 1)


QUANTISED = """
    g (float[1,1,2,2] x) => (float[1,1,2,2] y)
    <int8[1,1,1,1] q = {3}, int32[1] qb = {4}, float s = {0.5}, float[1,1,1,1] w = {2.0}> {
        read = DequantizeLinear(%s, s)
        one = Conv(x, %s)
        two = Conv(x, w)
        y = Add(one, two)
    }"""


@pytest.mark.parametrize(
    ("quantised", "read", "reason"),
    [
        pytest.param("q", "read", "its weight is quantised", id="a weight"),
        pytest.param("qb", "w, read", "its bias is quantised", id="a bias"),
    ],
)
def test_quantised_constants_stay_as_they_are(quantised: str, read: str, reason: str) -> None:
    declined(graph(QUANTISED % (quantised, read)), reason)


def test_doubles_are_declined() -> None:
    body = "p = Conv(x, w) q = Conv(x, v) y = Add(p, q)"
    constants = "<double[1,1,1,1] w = {1}, double[1,1,1,1] v = {2}>"
    before = graph(f"g (double[1,1,2,2] x) => (double[1,1,2,2] y) {constants} {{ {body} }}")
    declined(before, "of a type that TensorRT has no product for")


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_a_model_in_lower_precision_keeps_its_type(dtype: int) -> None:
    after, _ = merged(typed(dtype, 1.5, 3.0))
    assert ops(after) == ["Conv"]
    made = {t.name: t for t in after.proto.graph.initializer}
    assert {name: t.data_type for name, t in made.items()} == {"w/merged": dtype, "b/merged": dtype}
    assert np.all(after.array(made["w/merged"]).astype(np.float32) == 3)
    assert np.all(after.array(made["b/merged"]).astype(np.float32) == 6)


@pytest.mark.parametrize(
    ("weight", "bias"), [pytest.param(4e4, 1, id="weights"), pytest.param(1, 4e4, id="biases")]
)
def test_sums_beyond_fp16_are_declined(weight: float, bias: float) -> None:
    declined(typed(TensorProto.FLOAT16, weight, bias), "not finite in their type")
