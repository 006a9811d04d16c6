"""How many builds at a time."""

from __future__ import annotations

import os
from pathlib import Path

from rewriter.engines.protocol import EngineName

MOST_JOBS = 8
"""Builds at a time; each is a process with a model and its engine in memory."""

BUILD_BYTES = 2 * 1024**3
"""What a build takes besides the weights: libraries, CUDA, the optimiser."""

WEIGHTS_TIMES = 4
"""The model as read and as parsed, the builder's copy, the engine."""

TIMES_KERNELS = frozenset({"tensorrt"})
"""Engines that choose kernels by timing them on the GPU as they build: one at a time, and nothing beside."""


def builds_at_a_time(engine: EngineName, weights: int) -> int:
    """Half of the cores, as far as memory allows; one where a build would disturb the others.

    Args:
        weights: Bytes of the model's weights.
    """
    if engine in TIMES_KERNELS:
        return 1
    by_memory = _available_bytes() // (BUILD_BYTES + WEIGHTS_TIMES * weights)
    return max(1, min(MOST_JOBS, (os.cpu_count() or 2) // 2, by_memory))


def _available_bytes() -> int:
    """Memory that can be had without swapping; plenty where the system does not say."""
    try:
        with Path("/proc/meminfo").open(encoding="ascii") as table:
            lines = dict(line.split(":", 1) for line in table)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 1 << 62
