"""isolate-clip: Clips that become Max and Min, the targets concerned, and values that stay."""

import numpy as np
import pytest
from graphs import apply, graph, random_feeds, run
from onnx_text import sides

from rewriter.passes.base import Context
from rewriter.passes.isolate_clip import IsolateClip
from rewriter.target import Target


def test_nan_stays_nan() -> None:
    before = graph(sides(IsolateClip.example)[0])
    after, _ = apply(IsolateClip(), before)
    feeds = {name: np.full_like(value, np.nan) for name, value in random_feeds(before).items()}
    assert np.isnan(run(after, feeds)[0]).all()


TARGETS = [
    pytest.param("tensorrt", True, id="version unknown"),
    pytest.param("10.0.1", True, id="Conv+Clip defect"),
    pytest.param("10.1", False, id="defect mended"),
    pytest.param("10.13.3", False, id="a defect of MatMul and Add alone"),
    pytest.param("10.14", False, id="a later version"),
    pytest.param("tensorrt-rtx", False, id="another library"),
]


@pytest.mark.parametrize(("target", "applies"), TARGETS)
def test_the_target_decides(target: str, applies: bool) -> None:
    before = graph(sides(IsolateClip.example)[0])
    _, report = apply(IsolateClip(), before, Context(target=Target.parse(target)))
    assert bool(report.changes) is applies
