"""compensate-rounding: zeros and signs, the estimate of what weights cause, and the network's own verdict."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import apply, run
from hypothesis import given, settings
from hypothesis import strategies as st
from weighted import MATMUL, compensated, related, smooth, to_nearest, weighted, weights

from rewriter.base import Calibration, Context, Target
from rewriter.model import Array, Model
from rewriter.passes.compensate_rounding import CompensateRounding
from rewriter.rewriting.rounding import Grid, compared, network
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
    rounded = round_together(given_, factor, Grid(FP16).nearest)
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


def test_results_that_become_infinite_lose() -> None:
    source = weighted("g (float[4,8] x) => (float[4,8] y) { m = MatMul(x, w)  y = Log(m) }", w=(8, 8))
    (stored,) = source.proto.graph.initializer
    stored.CopyFrom(source.detached_tensor("w", np.eye(8, dtype=np.float32)))
    feeds = {"x": np.ones((4, 8), np.float32)}
    zeros, given_ = np.zeros((8, 8), np.float16), np.eye(8, dtype=np.float32) * np.float32(1.0004)
    found = compared(source, feeds, {"y": np.log(feeds["x"])}, {"w": zeros}, {"w": given_})
    assert found.together == np.inf and found.nearest < 1e-11  # 1.0004 becomes 1 in FP16
    assert not found.gains


def test_one_session_finds_what_two_find(monkeypatch: pytest.MonkeyPatch) -> None:
    source = weighted("g (float[4,8] x) => (float[4,8] y) { y = MatMul(x, w) }", w=(8, 8))
    (value,) = (source.array(tensor) for tensor in source.proto.graph.initializer)
    feeds = {"x": np.random.default_rng(1).standard_normal((4, 8)).astype(np.float32)}
    truncated = (value * np.float32(0.999)).astype(np.float16)
    own = {"y": feeds["x"] @ value}
    one = compared(source, feeds, own, {"w": truncated}, {"w": value})
    monkeypatch.setattr(network, "FED_BYTES", 0)
    two = compared(source, feeds, own, {"w": truncated}, {"w": value})
    assert not one.gains
    assert (one.together, one.nearest) == pytest.approx((two.together, two.nearest), rel=1e-3)
