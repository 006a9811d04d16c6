"""postpone-resize: Convs that stay after the Resize, with the reasons; branches."""

from __future__ import annotations

import pytest
from graphs import apply, graph, ops
from resized import INPUTS, LINEAR, SHAPED, TWICE, model

from rewriter.base import Context, Kept
from rewriter.model import load
from rewriter.passes.postpone_resize import PostponeResize


def test_sizes_with_an_unknown_batch_are_declined() -> None:
    before = model(SHAPED, "float[N,6,4,4] b", constants="int64[2] s = {8, 8}")
    after, report = apply(PostponeResize(work=0), before)
    assert after is before
    assert ["enlarges is not known" in refusal.reason for refusal in report.refusals] == [True]


def test_sizes_with_a_symbolic_batch_are_declined() -> None:
    before = model(SHAPED, "float[N,6,4,4] b", constants="int64[2] s = {8, 8}").whole()
    shape = next(v for v in before.graph.value_info if v.name == "p").type.tensor_type.shape
    shape.dim[0].dim_param = "N"
    after, report = apply(PostponeResize(work=0), load(before))
    assert ops(after)[-1] == "Conv"
    assert ["an unknown batch" in refusal.reason for refusal in report.refusals] == [True]


ONE = f"p = {LINEAR}(b, , twice)"
TAIL = "j = Concat<axis = 1>(a, p) y = Conv(j, u, bias)"
DECLINED = [
    pytest.param(
        f"{{ {ONE} {TAIL} z = Relu(p) }}",
        "the result of Resize(p)",
        id="an enlarged part with other consumers",
    ),
    pytest.param(
        f"{{ {ONE} {TAIL} z = Relu(j) }}", "j has other consumers", id="a Concat with other consumers"
    ),
    pytest.param(
        f"{{ {ONE} y = Conv(p, t) z = Neg(a) }}", "would enlarge 8 channels instead of 6", id="more channels"
    ),
    pytest.param(
        '{ p = Resize<coordinate_transformation_mode = "tf_crop_and_resize", mode = "linear">(b, roi, twice)'
        f" {TAIL} z = Neg(a) }}",
        "coordinates by tf_crop_and_resize",
        id="a part cut out",
    ),
    pytest.param(
        f"{{ s = Mul(twice, k) p = {LINEAR}(b, , s) {TAIL} z = Neg(a) }}",
        "the number of channels of p is unknown",
        id="computed scales",
    ),
    pytest.param(
        f"{{ {ONE} j = Concat<axis = 1>(a, p) n = Neg(u) y = Conv(j, n) z = Neg(a) }}",
        "weight is computed",
        id="computed weight",
    ),
]


@pytest.mark.parametrize(("body", "reason"), DECLINED)
def test_declined(body: str, reason: str) -> None:
    constants = f"{TWICE}, float[8] roi = {{0, 0, 0, 0, 1, 1, 0.5, 0.5}}"
    before = model(body, f"{INPUTS}, float[4] k", "y, z", constants=constants)
    after, report = apply(PostponeResize(work=0), before)
    assert after is before
    assert [reason in refusal.reason for refusal in report.refusals] == [True]


def test_sizes_that_keep_the_aspect_ratio_are_declined() -> None:
    body = (
        '{ p = Resize<mode = "linear", axes = [2, 3], keep_aspect_ratio_policy = "not_larger">(b, , , s)'
        " y = Conv(p, v, bias) }"
    )
    before = model(body, "float[1,6,4,4] b", constants="int64[2] s = {8, 12}", opset=18)
    after, report = apply(PostponeResize(work=0), before)
    assert after is before
    assert ["keeps the aspect ratio" in refusal.reason for refusal in report.refusals] == [True]


def test_an_old_opset_is_declined() -> None:
    body = '{ p = Resize<mode = "linear">(b, twice) y = Conv(p, v, bias) }'
    before = model(body, "float[1,6,4,4] b", opset=10)
    after, report = apply(PostponeResize(work=0), before)
    assert after is before
    assert "run upgrade-opset" in report.refusals[0].reason


def test_unknown_channels_are_declined() -> None:
    before = model(f"{{ {ONE} {TAIL} }}", "float[1,C,8,8] a, float[1,D,4,4] b")
    after, report = apply(PostponeResize(work=0), before)
    assert after is before
    assert ["the number of channels of a" in refusal.reason for refusal in report.refusals] == [True]


SILENT = [
    pytest.param("{ p = Resize(b, , half) y = Conv(p, v, bias) }", id="a Resize that reduces"),
    pytest.param(
        "{ p = Resize(b, , one_way) y = Conv(p, v, bias) }", id="it enlarges one axis, reduces another"
    ),
    pytest.param("{ p = Resize(b, , same) y = Conv(p, v, bias) }", id="it changes nothing"),
    pytest.param("{ p = Resize(b, , deep) y = Conv(p, twelve, bias) }", id="it enlarges channels"),
    pytest.param(f"{{ {ONE} r = Relu(p) y = Conv(r, v, bias) }}", id="an activation between"),
    pytest.param(f"{{ {ONE} y = Conv<strides = [2, 2]>(p, v, bias) }}", id="strides"),
    pytest.param(f"{{ {ONE} y = Conv<pads = [1, 1, 1, 1]>(p, v, bias) }}", id="pads"),
    pytest.param(f"{{ {ONE} y = Conv<group = 2>(p, grouped) }}", id="groups"),
    pytest.param(f"{{ {ONE} y = Conv(p, window) }}", id="a window of 2"),
    pytest.param(f"{{ {ONE} j = Concat<axis = 2>(p, p) y = Conv(j, v) }}", id="a Concat of places"),
]


@pytest.mark.parametrize("body", SILENT)
def test_skipped(body: str) -> None:
    constants = (
        f"{TWICE}, float[4] half = {{1, 1, 0.5, 0.5}}, float[4] one_way = {{1, 1, 4, 0.5}}, "
        "float[4] deep = {1, 2, 2, 2}, float[1,12,1,1] twelve = {1,1,1,1,1,1,1,1,1,1,1,1}, "
        "float[2,3,1,1] grouped = {1,2,3,4,5,6}, float[1,6,2,1] window = {1,2,3,4,5,6,7,8,9,10,11,12}"
    )
    before = model(body, "float[1,6,4,4] b", constants=constants)
    after, report = apply(PostponeResize(work=0), before)
    assert after is before
    assert not report.refusals


def test_quantised_weights_stay_as_they_are() -> None:
    before = graph(
        """
        g (float[1,2,2,2] x) => (float[1,1,4,4] y)
        <int8[1,2,1,1] q = {1, 2}, float s = {0.5}, float[4] twice = {1, 1, 2, 2}> {
            w = DequantizeLinear(q, s)
            p = Resize(x, , twice)
            y = Conv(p, w)
        }"""
    )
    after, report = apply(PostponeResize(work=0), before)
    assert after is before
    assert ["quantised" in refusal.reason for refusal in report.refusals] == [True]


KEPT = [
    pytest.param(Kept(("mix",)), id="the Conv by its name"),
    pytest.param(Kept(("j",)), id="the Concat by its output"),
    pytest.param(Kept(("p",)), id="the Resize"),
    pytest.param(Kept(ops=("Resize",)), id="by its operator"),
]


@pytest.mark.parametrize("kept", KEPT)
def test_nodes_that_the_user_keeps_in_fp32_stay(kept: Kept) -> None:
    before = model(f"{{ {ONE} j = Concat<axis = 1>(a, p) [mix] y = Conv(j, u, bias) }}")
    after, report = apply(PostponeResize(work=0), before, Context(kept=kept))
    assert after is before
    assert ["kept in FP32 by" in refusal.reason for refusal in report.refusals] == [True]


def test_a_resize_that_changes_nothing_stays_if_it_is_kept() -> None:
    body = f"{{ o = {LINEAR}(a, , same) {ONE} j = Concat<axis = 1>(o, p) y = Conv(j, u, bias) }}"
    after, _ = apply(PostponeResize(work=0), model(body), Context(kept=Kept(("o",))))
    assert ops(after).count("Resize") == 2
    after, _ = apply(PostponeResize(work=0), model(body))
    assert ops(after).count("Resize") == 1
