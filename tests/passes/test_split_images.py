"""split-images: Convs that read an image as hi and lo, and the bits that TF32 then loses."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import apply, keeps_results, ops, run
from weighted import weighted

import rewriter
from rewriter.emulation import emulation
from rewriter.figures.compare import relative_l2
from rewriter.model import Array, Model, facts, load
from rewriter.passes.split_images import SplitImages
from rewriter.pipeline.presets import PRESETS
from rewriter.verification.checks import run_all

HALVES = ["Clip", "Cast", "Cast", "Sub", "Concat"]
IMAGE = "g (float[N,3,8,8] x) => (float[N,5,6,6] y)"


def _emulated(source: Model, feeds: dict[str, Array]) -> Array:
    (outputs,) = run_all(emulation(source, facts.infer(source), tf32=True), [feeds])
    return outputs["y"]


def _exact_weights(source: Model) -> Model:
    """Weights that TF32 holds, so that what is read alone is rounded."""
    for stored in source.proto.graph.initializer:
        value = source.array(stored).astype(np.float16).astype(np.float32)
        stored.CopyFrom(source.detached_tensor(stored.name, value))
    return source


def _image(scale: float = 1.0) -> dict[str, Array]:
    values = np.random.default_rng(5).standard_normal((2, 3, 8, 8)) * scale
    return {"x": values.astype(np.float32)}


@pytest.mark.parametrize("opset", [13, 17, 21])
def test_an_image_is_read_twice(opset: int) -> None:
    before = weighted(f"{IMAGE} {{ y = Conv(x, w, b) }}", w=(5, 3, 3, 3), b=(5,))
    before.proto.opset_import[0].version = opset
    after, report = apply(SplitImages(), before)
    assert sorted(ops(after)) == sorted([*HALVES, "Conv"])
    assert [change.what for change in report.changes] == ["3 channels of an image as 6"]
    keeps_results(before, after, SplitImages())


def test_convs_of_one_image_share_the_halves() -> None:
    before = weighted(
        "g (float[1,3,8,8] x) => (float[1,5,6,6] y, float[1,5,6,6] z) { y = Conv(x, w) z = Conv(x, v) }",
        w=(5, 3, 3, 3),
        v=(5, 3, 3, 3),
    )
    after, _ = apply(SplitImages(), before)
    assert sorted(ops(after)) == sorted([*HALVES, "Conv", "Conv"])
    keeps_results(before, after, SplitImages())


@pytest.mark.parametrize("scale", [1e-6, 1.0, 255.0, 1e6], ids=str)
def test_tf32_loses_next_to_nothing_of_it(scale: float) -> None:
    before = _exact_weights(weighted(f"{IMAGE} {{ y = Conv(x, w) }}", w=(5, 3, 3, 3)))
    after, _ = apply(SplitImages(), before)
    feeds = _image(scale)
    (exact,) = run(before, feeds)
    plain, split = (relative_l2(exact, _emulated(m, feeds)) for m in (before, after))
    assert plain > 1e-4
    assert split < plain / 100 if 1e-3 < scale < 6e4 else split < plain * 1.01


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(
            weighted(
                "g (float[1,8,8,8] x) => (float[1,5,6,6] y) { y = Conv(x, w) }",
                w=(5, 8, 3, 3),
            ),
            id="eight channels",
        ),
        pytest.param(
            weighted(f"{IMAGE} {{ r = Relu(x) y = Conv(r, w) }}", w=(5, 3, 3, 3)), id="it reads no input"
        ),
        pytest.param(
            weighted(
                "g (float[1,3,8,8] x) => (float[1,3,6,6] y) { y = Conv<group = 3>(x, w) }", w=(3, 1, 3, 3)
            ),
            id="depthwise",
        ),
    ],
)
def test_skipped(source: Model) -> None:
    after, report = apply(SplitImages(), source)
    assert after is source
    assert not report.refusals


def test_opset_12_is_declined() -> None:
    before = weighted(f"{IMAGE} {{ y = Conv(x, w) }}", w=(5, 3, 3, 3))
    before.proto.opset_import[0].version = 12
    after, report = apply(SplitImages(), before)
    assert after is before
    assert "needs opset 13" in report.refusals[0].reason


@pytest.mark.parametrize(("kept", "split"), [([], False), (["y"], True)], ids=["in FP16", "in FP32"])
def test_accurate_splits_images_of_fp32_convs(kept: list[str], split: bool) -> None:
    source = weighted(f"{IMAGE} {{ y = Conv(x, w) }}", w=(5, 3, 3, 3)).whole()
    samples = [_image(), _image(2.0)]
    result = rewriter.fix(source, inputs=samples, preset="accurate", keep_fp32=kept, max_latency_cost=0.0)
    assert result.verdict is not None
    assert result.verdict.passed
    assert ("Concat" in ops(load(result.proto))) == split


def test_other_presets_lack_the_pass() -> None:
    assert {name for name, p in PRESETS.items() if "split-images" in p.pipeline} == {"accurate"}
