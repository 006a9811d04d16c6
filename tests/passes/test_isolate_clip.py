"""isolate-clip: Clips that become Max and Min, the targets concerned, and values that stay."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import apply, graph, random_feeds, run

from rewriter.base import Context, Target
from rewriter.passes.isolate_clip import DEFECTS, IsolateClip

BOTH = "float low = {-0.5}, float high = {0.5}"

ISOLATED = [
    pytest.param(
        f"g (float[2,3] x, float[3,4] w) => (float[2,4] y) <{BOTH}> {{"
        " c = MatMul(x, w) y = Clip(c, low, high) }",
        ["MatMul", "Max", "Min"],
        id="MatMul",
    ),
    pytest.param(
        f"g (float[2,3] x, float[3,4] w, float[4] b) => (float[2,4] y) <{BOTH}> {{"
        " c = MatMul(x, w) d = Add(b, c) y = Clip(d, low, high) }",
        ["MatMul", "Add", "Max", "Min"],
        id="MatMul with its bias, in swapped order",
    ),
    pytest.param(
        f"g (float[2,3] x, float[3,4] w) => (float[2,4] y) <{BOTH}> {{"
        " c = Gemm(x, w) y = Clip(c, low, high) }",
        ["Gemm", "Max", "Min"],
        id="Gemm",
    ),
    pytest.param(
        f"g (float[1,2,4] x, float[2,2,3] w) => (float[1,2,6] y) <{BOTH}> {{"
        " c = ConvTranspose(x, w) y = Clip(c, low, high) }",
        ["ConvTranspose", "Max", "Min"],
        id="ConvTranspose",
    ),
    pytest.param(
        f"g (float[2,3] x, float[3,4] w) => (float[2,4] y) <{BOTH}> {{ c = MatMul(x, w) y = Clip(c, low) }}",
        ["MatMul", "Max"],
        id="a lower bound alone",
    ),
    pytest.param(
        f"g (float[2,3] x, float[3,4] w) => (float[2,4] y) <{BOTH}> {{"
        " c = MatMul(x, w) y = Clip(c, , high) }",
        ["MatMul", "Min"],
        id="an upper bound alone",
    ),
    pytest.param(
        "g (float[2,3] x, float[3,4] w) => (float[2,4] y) {"
        " l = Constant<value_float = -0.5>() c = MatMul(x, w) y = Clip(c, l) }",
        ["MatMul", "Max"],
        id="a bound that is a Constant node",
    ),
    pytest.param(
        f"g (float[2,3] x, float[3,4] w) => (float[2,4] y, float[2,4] c) <{BOTH}> {{"
        " c = MatMul(x, w) y = Clip(c, low, high) }",
        ["MatMul", "Max", "Min"],
        id="the unclipped tensor is an output, too",
    ),
]


def test_nan_stays_nan() -> None:
    before = graph(ISOLATED[0].values[0])  # type: ignore[arg-type]
    after, _ = apply(IsolateClip(), before)
    feeds = random_feeds(before) | {"x": np.full((2, 3), np.nan, np.float32)}
    assert np.isnan(run(after, feeds)[0]).all()


TARGETS = [
    pytest.param("auto", "tensorrt", True, id="auto, version unknown"),
    pytest.param("auto", "10.0.1", True, id="auto, Conv+Clip defect"),
    pytest.param("auto", "10.1", False, id="auto, defect mended"),
    pytest.param("auto", "10.13.3", True, id="auto, MatMul-Add-Clip defect"),
    pytest.param("auto", "10.14", False, id="auto, a later version"),
    pytest.param("auto", "tensorrt-rtx", False, id="auto, another library"),
    pytest.param("always", "10.1", True, id="always"),
    pytest.param("never", "10.0.1", False, id="never"),
]


@pytest.mark.parametrize(("when", "target", "applies"), TARGETS)
def test_when(when: str, target: str, applies: bool) -> None:
    before = graph(ISOLATED[0].values[0])  # type: ignore[arg-type]
    step = IsolateClip(when=when)  # type: ignore[arg-type]
    _, report = apply(step, before, Context(target=Target.parse(target)))
    assert bool(report.changes) is applies


def test_ranges_of_versions_are_not_empty() -> None:
    assert all(first < good for first, good in DEFECTS)
