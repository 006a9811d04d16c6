"""compensate-rounding: weights on the grid of a lower type, errors on data held out, and `fix` with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from onnx import numpy_helper
from weighted import MATMUL, compensated, error, on_grid, related, smooth, to_nearest, weighted, weights

import rewriter
from rewriter.model import Model, load
from rewriter.passes import compensate_rounding
from rewriter.pipeline.presets import PRESETS
from rewriter.plan import Plan
from rewriter.rewriting.rounding import Used

CASES = [
    pytest.param(weighted(MATMUL, w=(48, 24)), (1, 96, 48), -1, id="MatMul"),
    pytest.param(
        weighted("g (float[1,48,96] x) => (float[1,24,96] y) { y = MatMul(w, x) }", w=(24, 48)),
        (1, 48, 96),
        1,
        id="MatMul, the weight on the left",
    ),
    pytest.param(
        weighted(
            "g (float[96,48] x) => (float[96,24] y) { y = Gemm<alpha = 0.5, transB = 1>(x, w, b) }",
            w=(24, 48),
            b=(24,),
        ),
        (96, 48),
        -1,
        id="Gemm with transB and alpha",
    ),
    pytest.param(
        weighted("g (float[48,96] x) => (float[96,24] y) { y = Gemm<transA = 1>(x, w) }", w=(48, 24)),
        (48, 96),
        0,
        id="Gemm with transA",
    ),
    pytest.param(
        weighted("g (float[48,96] x) => (float[24,96] y) { y = Gemm<transA = 1>(w, x) }", w=(48, 24)),
        (48, 96),
        0,
        id="Gemm, the weight on the left",
    ),
    pytest.param(
        weighted(
            "g (float[2,8,19,17] x) => (float[2,16,9,8] y)"
            " { y = Conv<strides = [2, 2], pads = [1, 0, 2, 1], dilations = [2, 2]>(x, w) }",
            w=(16, 8, 3, 3),
        ),
        (2, 8, 19, 17),
        1,
        id="Conv with strides, pads and dilations",
    ),
    pytest.param(
        weighted(
            "g (float[2,8,12,12] x) => (float[2,16,12,12] y)"
            ' { y = Conv<auto_pad = "SAME_UPPER", group = 4>(x, w) }',
            w=(16, 2, 3, 3),
        ),
        (2, 8, 12, 12),
        1,
        id="grouped Conv that pads by itself",
    ),
    pytest.param(
        weighted(
            "g (float[2,8,16,16] x) => (float[2,8,14,14] y) { y = Conv<group = 8>(x, w) }", w=(8, 1, 3, 3)
        ),
        (2, 8, 16, 16),
        1,
        id="depthwise Conv",
    ),
    pytest.param(
        weighted(
            "g (float[2,12,80] x) => (float[2,16,80] y) { y = Conv<pads = [1, 1]>(x, w) }", w=(16, 12, 3)
        ),
        (2, 12, 80),
        1,
        id="Conv of one axis",
    ),
    pytest.param(
        weighted("g (float[1,6,6,7,8] x) => (float[1,16,5,6,7] y) { y = Conv(x, w) }", w=(16, 6, 2, 2, 2)),
        (1, 6, 6, 7, 8),
        1,
        id="Conv of three axes",
    ),
]


@pytest.mark.parametrize(("source", "shape", "axis"), CASES)
def test_products_err_less_on_data_never_seen(source: Model, shape: tuple[int, ...], axis: int) -> None:
    made = smooth if any(a.name == "group" for a in source.proto.graph.node[0].attribute) else related
    feeds = [{"x": made(*shape, seed=seed, axis=axis)} for seed in range(4)]
    result, report = compensated(source, *feeds[:3])
    assert [change.node for change in report.changes] == ["model"]
    assert not report.refusals
    assert on_grid(weights(result)["w"])
    assert error(source, result, feeds[3]) < 0.8 * error(source, to_nearest(source), feeds[3])


def test_a_weight_that_several_nodes_read_alike() -> None:
    source = weighted(
        "g (float[96,48] x, float[96,48] z) => (float[96,24] y, float[96,24] v)"
        " { y = MatMul(x, w)  v = MatMul(z, w) }",
        w=(48, 24),
    )
    feeds = [
        {"x": related(96, 48, seed=s), "z": 3 * related(96, 48, seed=s + 50)[:, ::-1].copy()}
        for s in range(4)
    ]
    result, report = compensated(source, *feeds[:3])
    assert report.changes
    assert error(source, result, feeds[3]) < error(source, to_nearest(source), feeds[3])


def test_bf16_has_its_own_grid() -> None:
    source = weighted(MATMUL, w=(48, 24))
    feeds = [{"x": related(1, 96, 48, seed=s)} for s in range(3)]
    result, _ = compensated(source, *feeds, plan=Plan("bf16"))
    assert on_grid(weights(result)["w"], ml_dtypes.bfloat16)


def test_one_sample_holds_out_some_of_its_rows() -> None:
    result, report = compensated(weighted(MATMUL, w=(48, 24)), {"x": related(1, 96, 48)})
    assert report.changes
    assert on_grid(weights(result)["w"])


def test_it_is_the_same_every_time() -> None:
    source = weighted(MATMUL, w=(48, 24))
    feeds = [{"x": related(1, 96, 48, seed=s)} for s in range(3)]
    first, second = (weights(compensated(source, *feeds)[0])["w"] for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_dead_channels_are_rounded_to_nearest() -> None:
    source = weighted(MATMUL, w=(48, 24))
    alive = (np.arange(48) % 3 > 0).astype(np.float32)
    result, report = compensated(source, *({"x": related(1, 96, 48, seed=s) * alive} for s in range(3)))
    assert report.changes
    given_, found = weights(source)["w"], weights(result)["w"]
    np.testing.assert_array_equal(found[alive == 0], given_[alive == 0].astype(np.float16).astype(np.float32))


FP16 = 10


def test_fix_rounds_together_converts_exactly_and_builds() -> None:
    source = weighted(MATMUL, w=(48, 24)).whole()
    feeds = [{"x": related(1, 96, 48, seed=s)} for s in range(3)]
    plain = rewriter.fix(source, inputs=feeds, skip=["compensate-rounding"], build=False)
    result = rewriter.fix(source, inputs=feeds)
    assert result.verdict is not None
    assert result.verdict.passed
    assert "build" in {check.name for check in result.verdict.checks}
    (stored,) = (t for t in result.proto.graph.initializer if t.data_type == FP16)
    (other,) = (t for t in plain.proto.graph.initializer if t.data_type == FP16)
    value, nearest = numpy_helper.to_array(stored), numpy_helper.to_array(other)
    assert not np.array_equal(value, nearest)
    pass_alone, _ = compensated(load(source), *feeds[:-1])  # the last sample is kept aside for the checks
    np.testing.assert_array_equal(value.astype(np.float32), weights(pass_alone)["w"])


@pytest.mark.parametrize("preset", ["structure-only", "weak-typing"])
def test_presets_that_keep_fp32_lack_the_pass(preset: str) -> None:
    assert "compensate-rounding" not in PRESETS[preset].pipeline


def test_a_given_plan_needs_the_data_too() -> None:
    source = weighted(MATMUL, w=(48, 24)).whole()
    feeds = [{"x": related(1, 96, 48, seed=s)} for s in range(3)]
    first = rewriter.fix(source, inputs=feeds, build=False)
    second = rewriter.fix(source, inputs=feeds, build=False, plan=first.plan)
    assert second.proto == first.proto


def test_a_dry_run_rounds_and_writes_nothing_but_the_plan(tmp_path: Path) -> None:
    source = weighted(MATMUL, w=(48, 24)).whole()
    feeds = [{"x": related(1, 96, 48, seed=s)} for s in range(3)]
    written = rewriter.fix(source, inputs=feeds, verify=False)
    saved = tmp_path / "plan.json"
    dry = rewriter.fix(
        source, tmp_path / "out.onnx", inputs=feeds, verify=False, dry_run=True, save_plan=saved
    )
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert dry.proto == written.proto
    assert "compensate-rounding" in {result.name for result in dry.passes if result.changes}
    again = rewriter.fix(source, inputs=feeds, verify=False, plan=saved)
    assert again.proto == written.proto


def test_a_plan_without_data_rounds_to_nearest_and_reports_it() -> None:
    source = weighted(MATMUL, w=(48, 24)).whole()
    plan = rewriter.fix(source, inputs={"x": related(1, 96, 48)}, verify=False).plan
    result = rewriter.fix(source, verify=False, plan=plan)
    (refusal,) = (r for p in result.passes if p.name == "compensate-rounding" for r in p.refusals)
    assert "give inputs= to round" in refusal.reason
    value = numpy_helper.to_array(next(t for t in result.proto.graph.initializer if t.data_type == FP16))
    stored = numpy_helper.to_array(next(t for t in source.graph.initializer if t.name == "w"))
    np.testing.assert_array_equal(value, stored.astype(np.float16))


def test_the_change_has_the_errors_of_products_and_of_the_network_where_it_was_run() -> None:
    @dataclass
    class Errors:
        error: float
        nearest: float

    def summary(whole: Used | None, *errors: tuple[float, float]) -> str:
        return compensate_rounding._summary([Errors(*one) for one in errors], whole)  # type: ignore[misc]

    several = "3 weights rounded together: 2.0e-04 of each product instead of 5.0e-04, on rows held out"
    three = (1e-4, 5e-4), (2e-4, 4e-4), (3e-4, 6e-4)
    assert summary(None, *three) == several
    assert summary(Used((), 1e-3, 2e-3), *three) == (
        f"{several}; 1.0e-03 of the network's results instead of 2.0e-03"
    )
    assert summary(None, (1e-4, 5e-4)).startswith("a weight rounded together: 1.0e-04")
