"""Stops runs of ONNX Runtime at a deadline."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rewriter.engines.onnxruntime_module import import_onnxruntime
from rewriter.errors import TimeUpError

if TYPE_CHECKING:
    import onnxruntime as ort


def time_up() -> TimeUpError:
    """The error of a run that its deadline ended."""
    return TimeUpError(
        "a run on ONNX Runtime was stopped at its deadline",
        hint="allow more time, or take smaller or fewer samples",
    )


@contextmanager
def stopped_at(until: float) -> Iterator[ort.RunOptions | None]:
    """Run options that raise an exception of ONNX Runtime at `until`; None if there is no deadline.

    The node that is computed at that moment is finished.

    Args:
        until: By time.monotonic().
    """
    if not math.isfinite(until):
        yield None
        return
    options = import_onnxruntime().RunOptions()

    def end() -> None:
        options.terminate = True

    timer = threading.Timer(max(0.0, until - time.monotonic()), end)
    timer.daemon = True
    timer.start()
    try:
        yield options
    finally:
        timer.cancel()
