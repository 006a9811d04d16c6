"""compensate-rounding{tf32=true}: weights of FP32 products are rounded to TF32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import apply
from weighted import compensated as _plain
from weighted import error, on_grid, related, smooth, weighted, weights

import rewriter
from rewriter.base import Calibration, Context
from rewriter.model import Array, Model, load
from rewriter.passes.compensate_rounding import CompensateRounding
from rewriter.plan import Decision, Plan
from rewriter.planning.planner import SEARCHED
from rewriter.rewriting.rounding import Grid

TF32 = Grid(1)
PAIR = weighted(
    "g (float[96,48] x) => (float[96,24] y) { h = Gemm(x, w, b)  r = Relu(h)  y = Gemm(r, v, c) }",
    w=(48, 32),
    b=(32,),
    v=(32, 24),
    c=(24,),
)
CONVS = weighted(
    "g (float[1,16,12,12] x) => (float[1,16,12,12] y)"
    " { c = Conv<pads = [1,1,1,1]>(x, w, b) r = Relu(c) d = Conv(r, u, e) s = Relu(d) y = Conv(s, v, f) }",
    w=(64, 16, 3, 3),
    b=(64,),
    u=(64, 64, 1, 1),
    e=(64,),
    v=(16, 64, 1, 1),
    f=(16,),
)
FEEDS = [{"x": related(96, 48, seed=seed)} for seed in range(4)]


def kept(rule: str, key: str = "0:y", repair: Any = "fp32") -> Plan:
    return Plan("fp16", decisions=(Decision("m", "Gemm", key, rule, "because", repair=repair),))


def compensated(source: Model, plan: Plan) -> dict[str, Array]:
    given = Calibration(FEEDS[:3])
    result, _ = apply(CompensateRounding(tf32=True), source, Context(calibration=given, plan=plan))
    return weights(result)


@pytest.mark.parametrize("rule", [SEARCHED, "partial-sums"])
def test_an_fp32_product_gets_tf32_weights_and_keeps_its_bias(rule: str) -> None:
    given, found = weights(PAIR), compensated(PAIR, kept(rule))
    assert on_grid(found["w"])
    assert on_grid(found["b"])
    assert TF32.holds(found["v"])
    assert not np.array_equal(found["v"], TF32.nearest(given["v"]))
    np.testing.assert_array_equal(found["c"], given["c"])


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(kept("user"), id="the user keeps it"),
        pytest.param(kept("overflow", repair="bf16"), id="in BF16"),
    ],
)
def test_other_products_are_unchanged(plan: Plan) -> None:
    given, found = weights(PAIR), compensated(PAIR, plan)
    np.testing.assert_array_equal(found["v"], given["v"])
    np.testing.assert_array_equal(found["c"], given["c"])
    assert on_grid(found["w"])


def test_numbers_that_fp16_lacks_are_kept() -> None:
    """Numbers of this size are subnormal in FP16, but not with FP32's exponents."""
    source = weighted("g (float[96,48] x) => (float[96,24] y) { y = MatMul(x, w) }", w=(48, 24))
    stored = source.proto.graph.initializer[0]
    stored.CopyFrom(source.detached_tensor("w", source.array(stored) * np.float32(1e-6)))
    given, found = weights(source)["w"], compensated(source, kept(SEARCHED))["w"]
    assert TF32.holds(found)
    assert np.linalg.norm(found - given) < 1e-3 * np.linalg.norm(given)


def test_products_err_less_than_with_weights_rounded_to_nearest() -> None:
    source = weighted("g (float[96,48] x) => (float[96,24] y) { y = MatMul(x, w) }", w=(48, 24))
    context = Context(calibration=Calibration(FEEDS[:3]), plan=kept(SEARCHED))
    result, _ = apply(CompensateRounding(tf32=True), source, context)
    nearest = source.copy()
    stored = nearest.proto.graph.initializer[0]
    stored.CopyFrom(nearest.detached_tensor("w", TF32.nearest(weights(source)["w"])))
    assert error(source, result, FEEDS[3]) < 0.8 * error(source, nearest, FEEDS[3])


def test_a_depthwise_conv_keeps_its_weights_only_in_fp32() -> None:
    source = weighted(
        "g (float[2,8,16,16] x) => (float[2,8,14,14] y) { y = Conv<group = 8>(x, w) }", w=(8, 1, 3, 3)
    )
    feeds = [{"x": smooth(2, 8, 16, 16, seed=seed)} for seed in range(3)]
    context = Context(calibration=Calibration(feeds), plan=kept(SEARCHED))
    exact, _ = apply(CompensateRounding(tf32=True), source, context)
    assert exact is source
    rounded, _ = _plain(source, *feeds)
    assert on_grid(weights(rounded)["w"])


def test_a_filter_that_runs_without_tensor_cores_keeps_its_weights_in_fp32() -> None:
    """Its kernel does not round to TF32; rounded filters made basic-pitch's error 30 times as large."""
    source = weighted(
        "g (float[1,1,1,2048] x) => (float[1,4,1,7] y) { y = Conv<strides = [1, 256]>(x, w) }",
        w=(4, 1, 1, 512),
    )
    feeds = [{"x": smooth(1, 1, 1, 2048, seed=seed)} for seed in range(3)]
    context = Context(calibration=Calibration(feeds), plan=kept(SEARCHED))
    exact, _ = apply(CompensateRounding(tf32=True), source, context)
    assert exact is source


def test_a_weight_with_consumers_in_two_types_is_unchanged() -> None:
    source = weighted(
        "g (float[96,48] x, float[96,48] z) => (float[96,24] v, float[96,24] y)"
        " { v = MatMul(x, w)  y = MatMul(z, w) }",
        w=(48, 24),
    )
    feeds = [{"x": f["x"], "z": f["x"][::-1].copy()} for f in FEEDS[:3]]
    context = Context(calibration=Calibration(feeds), plan=kept(SEARCHED))
    result, report = apply(CompensateRounding(tf32=True), source, context)
    assert result is source
    assert "a consumer of the weight computes in another type" in report.refusals[0].reason


@pytest.mark.parametrize(
    "products", ["v = MatMul(x, w)  y = MatMul(z, w)", "y = MatMul(z, w)  v = MatMul(x, w)"]
)
def test_a_weight_that_one_consumer_takes_as_it_is_stays_exact(products: str) -> None:
    """A row times a matrix needs no Tensor Core: TensorRT does not round that product's weights."""
    source = weighted(
        f"g (float[1,48] x, float[96,48] z) => (float[1,24] v, float[96,24] y) {{ {products} }}", w=(48, 24)
    )
    feeds = [{"x": f["x"][:1], "z": f["x"]} for f in FEEDS[:3]]
    both = Plan("fp16", decisions=(*kept(SEARCHED).decisions, *kept(SEARCHED, "0:v").decisions))
    context = Context(calibration=Calibration(feeds), plan=both)
    result, report = apply(CompensateRounding(tf32=True), source, context)
    assert result is source
    assert "a consumer of the weight computes without Tensor Cores" in report.refusals[0].reason


def test_products_are_rounded_after_a_search(tmp_path: Path) -> None:
    """The saved plan gives the same model again."""
    plan, source = tmp_path / "plan.json", CONVS.whole()
    samples = [{"x": smooth(1, 16, 12, 12, seed=seed)} for seed in range(3)]
    given: dict[str, Any] = {"preset": "accurate", "inputs": samples, "verify": False}
    first = rewriter.fix(source, save_plan=plan, max_latency_cost=0.9, **given)
    assert first.plan is not None
    searched = {d.key for d in first.plan.decisions if d.rule == SEARCHED and d.op == "Conv"}
    assert searched
    assert len([p for p in first.passes if p.name == "compensate-rounding"]) == 1
    model = load(first.proto)
    found = {t.name: model.array(t) for t in model.proto.graph.initializer}
    for node in model.proto.graph.node:
        if f"0:{node.output[0]}" in searched:
            weight, bias = (found[name] for name in node.input[1:])
            assert weight.dtype == bias.dtype == np.float32
            assert TF32.holds(weight)
            assert not on_grid(bias)
    again = rewriter.fix(source, plan=plan, **given)
    assert again.proto.graph.SerializeToString() == first.proto.graph.SerializeToString()
