"""Number of builds to run at a time."""

from __future__ import annotations

import os

from rewriter.ir.children import available_memory
from rewriter.runtime.engines.protocol import EngineName

MOST_JOBS = 8
"""Builds at a time; each is a process with a model and its engine in memory."""

BUILD_BYTES = 2 * 1024**3
"""Memory of a build besides the weights: libraries, CUDA, the optimiser."""

WEIGHTS_TIMES = 4
"""The model as read and as parsed, the builder's copy, the engine."""

TIMES_KERNELS = frozenset({"tensorrt"})
"""Engines whose builder times kernels on the GPU: one build at a time, with no other work beside it."""


def builds_at_a_time(engine: EngineName, weights: int) -> int:
    """Half of the cores, as far as memory allows; 1 if builds would disturb each other's timings.

    Args:
        weights: Bytes of the model's weights.
    """
    if engine in TIMES_KERNELS:
        return 1
    jobs = min(MOST_JOBS, (os.cpu_count() or 2) // 2)
    if free := available_memory():
        jobs = min(jobs, free // (BUILD_BYTES + WEIGHTS_TIMES * weights))
    return max(1, jobs)
