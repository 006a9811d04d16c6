"""An end to runs of ONNX Runtime at a moment that was said before."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnxruntime as ort


@contextmanager
def ended_at(until: float) -> Iterator[ort.RunOptions | None]:
    """Options for runs that end, with an exception of ONNX Runtime, at `until`; None for no end.

    A run ends behind the node that it computes at that moment.

    Args:
        until: By time.monotonic().
    """
    import onnxruntime as ort

    if not math.isfinite(until):
        yield None
        return
    options = ort.RunOptions()

    def end() -> None:
        options.terminate = True

    timer = threading.Timer(max(0.0, until - time.monotonic()), end)
    timer.daemon = True
    timer.start()
    try:
        yield options
    finally:
        timer.cancel()
