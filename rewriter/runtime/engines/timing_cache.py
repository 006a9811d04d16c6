"""Kernel timings that `tensorrt` keeps between builds, one file for each library version and GPU.

A build that finds its kernels there is quicker and chooses the same ones again. TensorRT-RTX has none: it
compiles on the GPU that it runs on, and asking for one makes a build without a GPU fail.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewriter.ir.model.output_files import replacing
from rewriter.runtime.engines import nvidia_driver
from rewriter.runtime.engines.user_cache import user_cache


@dataclass(frozen=True)
class TimingCache:
    """The cache that a builder's config uses, and its file."""

    config: Any
    path: Path

    def keep(self) -> None:
        """Write the file; failures are ignored, as they only make the next build slower."""
        with contextlib.suppress(OSError), replacing(self.path) as temporary:
            temporary.write_bytes(memoryview(self.config.get_timing_cache().serialize()))


def open_cache(trt: Any, config: Any) -> TimingCache | None:
    """Set the config's cache; None if the library or the machine has none."""
    gpus = nvidia_driver.gpus()
    if trt.__name__ != "tensorrt" or not gpus:
        return None
    try:
        path = user_cache("timing", f"{trt.__name__} {trt.__version__} {gpus[0].name}.cache")
        stored = path.read_bytes() if path.is_file() else b""
    except OSError:
        return None
    cache = config.create_timing_cache(stored)
    if not config.set_timing_cache(cache, False):
        return None
    return TimingCache(config, path)
