"""isolate-clip: values that stay; the targets concerned are in text/."""

import numpy as np
from graphs import apply, graph, random_feeds, run
from onnx_text import sides

from rewriter.passes.isolate_clip import IsolateClip


def test_nan_stays_nan() -> None:
    before = graph(sides(IsolateClip.example)[0])
    after, _ = apply(IsolateClip(), before)
    feeds = {name: np.full_like(value, np.nan) for name, value in random_feeds(before).items()}
    assert np.isnan(run(after, feeds)[0]).all()
