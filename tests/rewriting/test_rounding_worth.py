"""compensate-rounding: zeros and signs, the estimate of what weights cause, and the network's own verdict."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from graphs import apply, run
from hypothesis import given, settings
from hypothesis import strategies as st
from weighted import MATMUL, compensated, related, smooth, to_nearest, weighted, weights

from rewriter.base import Calibration, Context, Target
from rewriter.graph import open_graphs
from rewriter.model import Array, Model, facts
from rewriter.passes.compensate_rounding import CompensateRounding
from rewriter.rewriting.rounding import Grid, Layer, Rounded, Used, layers, network, used
from rewriter.rewriting.rounding.nearest_plane import cholesky, round_together

FP16 = 10
BINS, BANDS = 65, 24


def filter_bank() -> Array:
    """Overlapping triangles over the bins of a spectrum, float32 [BINS, BANDS], mostly zero."""
    centres = np.linspace(0, BINS - 1, BANDS + 2)
    bins = np.arange(BINS)[:, np.newaxis]
    width = centres[1] - centres[0]
    triangles: Array = np.maximum(0.0, 1.0 - np.abs(bins - centres[1:-1]) / width) * 0.0371
    return triangles.astype(np.float32)


def spectrum(seed: int) -> Array:
    """Power of harmonic sounds, float32 [1, 64, BINS]: silent in some bands."""
    rng = np.random.default_rng(seed)
    envelope = np.exp(-np.arange(BINS) / 9.0) * rng.uniform(0.1, 1, (64, 1))
    power: Array = envelope * rng.chisquare(2, (64, BINS)) + 1e-7
    return power.astype(np.float32)[np.newaxis]


def front_end() -> Model:
    """A mel filter bank and its logarithm."""
    source = weighted(
        f"g (float[1,64,{BINS}] x) => (float[1,64,{BANDS}] y) {{ m = MatMul(x, w)  y = Log(m) }}",
        w=(BINS, BANDS),
    )
    (stored,) = source.proto.graph.initializer
    stored.CopyFrom(source.detached_tensor("w", filter_bank()))
    return source


def test_a_filter_bank_keeps_its_zeros_and_no_weight_becomes_negative() -> None:
    source = front_end()
    result, report = compensated(source, *({"x": spectrum(seed)} for seed in range(3)))
    assert report.changes
    before, after = weights(source)["w"], weights(result)["w"]
    assert np.count_nonzero(before == 0) > BINS * BANDS / 2
    assert not after[before == 0].any()
    assert (after >= 0).all()
    assert not np.array_equal(after, weights(to_nearest(source))["w"])
    assert np.isfinite(run(result, {"x": spectrum(7)})[0]).all()


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 999), rows=st.integers(8, 80))
def test_no_weight_changes_its_sign(seed: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    data = related(1, rows, 48, seed=seed)
    given_ = rng.standard_normal((1, 48, 16)).astype(np.float32) * 10.0 ** rng.uniform(-8, 0, (1, 48, 16))
    given_ = np.where(rng.random(given_.shape) < 0.3, 0, given_).astype(np.float32)
    factor = cholesky(data)
    assert factor is not None
    rounded = round_together(given_, factor, Grid(FP16))
    assert ((rounded == 0) | (np.sign(rounded) == np.sign(given_))).all()


def conv_net(channels: int, pooled: bool) -> Model:
    """A 3 x 3 Conv of so many channels; its result is an image, or the means of its channels."""
    end = "y = GlobalAveragePool(c)" if pooled else "y = Relu(c)"
    side = 1 if pooled else 24
    return weighted(
        f"g (float[1,{channels},24,24] x) => (float[1,32,{side},{side}] y)"
        f" {{ c = Conv<pads = [1, 1, 1, 1]>(x, w)  {end} }}",
        w=(32, channels, 3, 3),
    )


def rounded_by(
    step: CompensateRounding, source: Model, target: Target | None = None
) -> tuple[Model, list[str]]:
    (channels,) = {v.type.tensor_type.shape.dim[1].dim_value for v in source.proto.graph.input}
    samples = [{"x": smooth(1, channels, 24, 24, seed=seed)} for seed in range(3)]
    context = Context(calibration=Calibration(samples), target=target or Target())
    result, report = apply(step, source, context)
    return result, [refusal.reason for refusal in report.refusals]


def test_a_deep_conv_errs_by_its_fp16_sums_and_is_skipped_with_the_figure() -> None:
    source = conv_net(96, pooled=False)
    result, reasons = rounded_by(CompensateRounding(), source)
    assert result is source
    (reason,) = reasons
    assert "3.4% of its square" in reason
    assert "share=0" in reason


@pytest.mark.parametrize(
    ("step", "channels", "pooled", "target"),
    [
        pytest.param(CompensateRounding(share=0.0), 96, False, Target(), id="all, by request"),
        pytest.param(CompensateRounding(), 8, False, Target(), id="a shallow sum"),
        pytest.param(CompensateRounding(), 96, True, Target(), id="sums that a mean averages"),
        pytest.param(
            CompensateRounding(),
            96,
            False,
            Target(answers={"conv-accumulation": "fp32"}),
            id="a target that sums in FP32",
        ),
    ],
)
def test_weights_that_matter_are_rounded(
    step: CompensateRounding, channels: int, pooled: bool, target: Target
) -> None:
    source = conv_net(channels, pooled)
    result, reasons = rounded_by(step, source, target)
    assert result is not source
    assert not reasons


def test_the_network_has_the_last_word() -> None:
    """The product errs less on the whole, but the channel that the network hands out errs more."""

    def feed(seed: int) -> dict[str, Array]:
        noise = np.random.default_rng(seed + 9).standard_normal((1, 96, 48))
        return {"x": (related(1, 96, 48, seed=seed) + noise).astype(np.float32)}

    product = weighted(MATMUL, w=(48, 24))
    assert compensated(product, *map(feed, range(3)))[1].changes
    source = weighted(
        "g (float[1,96,48] x) => (float[1,96] y) { m = MatMul(x, w)"
        " i = Constant<value = int64 {13}>()  y = Gather<axis = 2>(m, i) }",
        w=(48, 24),
    )
    result, report = compensated(source, *map(feed, range(3)))
    assert result is source
    assert "the network errs more" in report.refusals[0].reason


@pytest.mark.parametrize(
    ("factors", "kept"),
    [
        ({"a": 1.0, "b": 1.0, "c": 1.0}, "abc"),
        ({"a": 1.1, "b": 1.0, "c": 1.0}, "bc"),
        ({"a": 1.1, "b": 1.0, "c": 1.1}, "b"),
        ({"a": 1.1, "b": 1.1, "c": 1.1}, ""),
    ],
)
def test_blocks_of_layers_that_gain_are_used_without_those_that_lose(
    factors: dict[str, float], kept: str
) -> None:
    """Weights "rounded together" are 1 or 1.1 times the network's own, those "to nearest" 1.01 times."""
    source = weighted(
        "g (float[4,8] x) => (float[4,24] y) {"
        " p = MatMul(x, a)  q = MatMul(x, b)  r = MatMul(x, c)  y = Concat<axis = 1>(p, q, r) }",
        **dict.fromkeys("abc", (8, 8)),
    )
    own = {tensor.name: source.array(tensor) for tensor in source.proto.graph.initializer}
    graph, *_ = open_graphs(source, facts.infer(source), tag="test")
    together = {name: (own[name] * np.float32(factors[name])).astype(np.float16) for name in own}
    rounded = [
        Rounded(layer, together[layer.weight], None, 0.0, 1.0)
        for layer in layers(graph, lambda _: FP16)
        if isinstance(layer, Layer)
    ]
    nearest = {name: value * np.float32(1.01) for name, value in own.items()}
    feeds = {"x": np.random.default_rng(1).standard_normal((4, 8)).astype(np.float32)}
    results = {"y": np.concatenate([feeds["x"] @ own[name] for name in "abc"], axis=1)}
    found = used(source, feeds, results, rounded, together, nearest)
    assert "".join(one.layer.weight for one in found.layers) == kept
    assert found.nearest == pytest.approx(0.01, rel=0.1)
    assert (found.together <= found.nearest) == bool(kept)


def test_the_report_counts_the_layers_that_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(model: Model, feeds: object, own: object, rounded: Sequence[Rounded], *_: object) -> Used:
        return Used(tuple(rounded[:1]), 0.1, 0.2)

    monkeypatch.setattr("rewriter.passes.compensate_rounding.used", first)
    source = weighted(
        "g (float[1,96,48] x) => (float[1,96,24] y, float[1,96,48] z) { y = MatMul(x, w)  z = MatMul(x, v) }",
        w=(48, 24),
        v=(48, 48),
    )
    feeds = [{"x": related(1, 96, 48, seed=seed).astype(np.float32)} for seed in range(3)]
    result, report = compensated(source, *feeds)
    (refusal,) = report.refusals
    assert "1 of 2 layers are rounded to nearest" in refusal.reason
    before, after = ({t.name: m.array(t) for t in m.proto.graph.initializer} for m in (source, result))
    assert not np.array_equal(before["w"], after["w"]) and np.array_equal(before["v"], after["v"])


def test_results_that_become_infinite_lose() -> None:
    source = weighted("g (float[4,8] x) => (float[4,8] y) { m = MatMul(x, w)  y = Log(m) }", w=(8, 8))
    (stored,) = source.proto.graph.initializer
    stored.CopyFrom(source.detached_tensor("w", np.eye(8, dtype=np.float32)))
    feeds = {"x": np.ones((4, 8), np.float32)}
    zeros, given_ = np.zeros((8, 8), np.float16), np.eye(8, dtype=np.float32) * np.float32(1.0004)
    with network.network(source, feeds, {"y": np.log(feeds["x"])}, {"w": zeros}, {"w": given_}) as error:
        assert error({"w"}) == np.inf and error(()) < 1e-11  # 1.0004 becomes 1 in FP16


def test_one_session_finds_what_several_find(monkeypatch: pytest.MonkeyPatch) -> None:
    source = weighted("g (float[4,8] x) => (float[4,8] y) { y = MatMul(x, w) }", w=(8, 8))
    (value,) = (source.array(tensor) for tensor in source.proto.graph.initializer)
    feeds = {"x": np.random.default_rng(1).standard_normal((4, 8)).astype(np.float32)}
    truncated = (value * np.float32(0.999)).astype(np.float16)

    own = {"y": feeds["x"] @ value}

    def errors() -> tuple[float, float]:
        with network.network(source, feeds, own, {"w": truncated}, {"w": value}) as error:
            return error({"w"}), error(())

    fed = errors()
    monkeypatch.setattr(network, "FED_BYTES", 0)
    assert fed == pytest.approx(errors(), rel=1e-3)
    assert fed[0] > fed[1] > 0
