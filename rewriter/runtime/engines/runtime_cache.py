"""Kernels that TensorRT-RTX compiled for this GPU, kept in a file from one engine to the next.

An engine of TensorRT-RTX is built ahead of time and compiled when a context is made, or at its first run. The
plans of a search share most of their kernels, which need no second compilation with this cache. `tensorrt`
has none: its builds hold compiled kernels (timing_cache.py).

The engines of a process share one cache in memory. Five plans of a ResNet-50 then load in 4.4 s instead of
5.9 (one H200, TensorRT-RTX 1.6.1). Loading them in parallel threads takes as long or longer.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from rewriter.ir.model.output_files import replacing


@dataclass(frozen=True)
class RuntimeCache:
    """The cache that a context uses, and its file."""

    cache: Any
    path: Path

    def keep(self) -> None:
        """Write the file; failures are ignored, as they only make the next engine slower to load."""
        with contextlib.suppress(OSError), replacing(self.path) as temporary:
            temporary.write_bytes(memoryview(self.cache.serialize()))


_SHARED: WeakValueDictionary[Path, RuntimeCache] = WeakValueDictionary()
"""By file: each lives as long as one of the engines that use it."""


def open_cache(config: Any, path: Path | None) -> RuntimeCache | None:
    """Sets the cache of an IRuntimeConfig; None if none is wanted, or the library has none.

    A file from another GPU, driver or release is refused by the library, and written anew.
    """
    if path is None or not hasattr(config, "create_runtime_cache"):
        return None
    cache = _SHARED.get(path) or _read(config, path)
    if not config.set_runtime_cache(cache.cache):
        return None
    _SHARED[path] = cache
    return cache


def _read(config: Any, path: Path) -> RuntimeCache:
    """A new cache, with the kernels of the file if there is one."""
    cache = config.create_runtime_cache()
    with contextlib.suppress(OSError):
        if path.is_file():
            cache.deserialize(path.read_bytes())
    return RuntimeCache(cache, path)
