"""isolate-clip: Clips that become Max and Min, the targets concerned, and values that stay."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import apply, graph, random_feeds, run

from rewriter.ir.base import Context, Target
from rewriter.passes.isolate_clip import IsolateClip


def test_nan_stays_nan() -> None:
    before = graph(IsolateClip.before)
    after, _ = apply(IsolateClip(), before)
    feeds = {name: np.full_like(value, np.nan) for name, value in random_feeds(before).items()}
    assert np.isnan(run(after, feeds)[0]).all()


TARGETS = [
    pytest.param("auto", "tensorrt", True, id="auto, version unknown"),
    pytest.param("auto", "10.0.1", True, id="auto, Conv+Clip defect"),
    pytest.param("auto", "10.1", False, id="auto, defect mended"),
    pytest.param("auto", "10.13.3", False, id="auto, a defect of MatMul and Add alone"),
    pytest.param("auto", "10.14", False, id="auto, a later version"),
    pytest.param("auto", "tensorrt-rtx", False, id="auto, another library"),
    pytest.param("always", "10.1", True, id="always"),
    pytest.param("never", "10.0.1", False, id="never"),
]


@pytest.mark.parametrize(("when", "target", "applies"), TARGETS)
def test_when(when: str, target: str, applies: bool) -> None:
    before = graph(IsolateClip.before)
    step = IsolateClip(when=when)  # type: ignore[arg-type]
    _, report = apply(step, before, Context(target=Target.parse(target)))
    assert bool(report.changes) is applies
