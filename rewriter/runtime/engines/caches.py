"""The user's cache folder: timings and compiled kernels, which can be made again, and the GPU's turn.

`tensorrt` keeps timings of kernels between builds, one file for each library version and GPU: a build that
finds its kernels there is quicker and chooses the same ones again. TensorRT-RTX has none: it compiles on the
GPU that it runs on, and asking for one makes a build without a GPU fail.

TensorRT-RTX compiles an engine when a context is made, or at its first run, and keeps the kernels. The plans
of a search share most of them, and the engines of a process share one cache in memory. Five plans of a
ResNet-50 then load in 4.4 s instead of 5.9 (one H200, TensorRT-RTX 1.6.1). Loading them in parallel threads
takes as long or longer.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from rewriter.ir.model.output_files import replacing
from rewriter.runtime.engines import nvidia_driver

VARIABLE = "REWRITER_CACHE"

MOST_S = 60.0
"""Longest wait for the GPU, in seconds, which is a part of the time limit of a build or run. Runs take
seconds; who waits for a long build of `tensorrt` measures beside it in the end."""


def user_cache(*parts: str) -> Path:
    """A path in the user's cache folder, its folder made: `user_cache("timing", "tensorrt 10.3.cache")`.

    `REWRITER_CACHE` names the folder itself; else it is the platform's: ~/.cache/rewriter, for example. What
    a file name cannot hold becomes `_`.
    """
    path = _root().joinpath(*(re.sub(r"[^\w.+-]+", "_", part) for part in parts))
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _root() -> Path:
    if given := os.environ.get(VARIABLE):
        return Path(given)
    from platformdirs import user_cache_path

    return user_cache_path("rewriter", appauthor=False)


@dataclass(frozen=True)
class LibraryCache:
    """A cache of a library's and its file. `content` returns the library's object to serialise."""

    content: Callable[[], Any]
    path: Path

    def keep(self) -> None:
        """Write the file; failures are ignored, as they only make the next build or engine slower."""
        with contextlib.suppress(OSError), replacing(self.path) as temporary:
            temporary.write_bytes(memoryview(self.content().serialize()))


def timing_cache(trt: Any, config: Any) -> LibraryCache | None:
    """Sets the timing cache of a builder's config; None if the library or the machine has none."""
    gpus = nvidia_driver.gpus()
    if trt.__name__ != "tensorrt" or not gpus:
        return None
    try:
        path = user_cache("timing", f"{trt.__name__} {trt.__version__} {gpus[0].name}.cache")
        stored = path.read_bytes() if path.is_file() else b""
    except OSError:
        return None
    if not config.set_timing_cache(config.create_timing_cache(stored), False):
        return None
    return LibraryCache(config.get_timing_cache, path)


_KERNELS: WeakValueDictionary[Path, LibraryCache] = WeakValueDictionary()
"""Caches of kernels by file: each lives as long as one of the engines that use it."""


def kernel_cache(config: Any, path: Path | None) -> LibraryCache | None:
    """Sets the cache of an IRuntimeConfig; None if none is wanted, or the library has none.

    A file from another GPU, driver or release is refused by the library, and written anew.
    """
    if path is None or not hasattr(config, "create_runtime_cache"):
        return None
    cache = _KERNELS.get(path)
    if cache is None:
        kernels = config.create_runtime_cache()
        with contextlib.suppress(OSError):
            if path.is_file():
                kernels.deserialize(path.read_bytes())
        cache = LibraryCache(lambda: kernels, path)
    if not config.set_runtime_cache(cache.content()):
        return None
    _KERNELS[path] = cache
    return cache


@contextlib.contextmanager
def gpu_turn() -> Iterator[None]:
    """Waits until no other process of this user with the same `CUDA_VISIBLE_DEVICES` measures.

    Engines that run side by side slow each other down by chance. A process that ends, however it does, gives
    its turn back. After `MOST_S`, or where the lock's file cannot be written, this one goes on all the same.
    """
    from filelock import FileLock

    with contextlib.ExitStack() as turn:
        # time is up, or the folder is read-only; the file system has no locks
        with contextlib.suppress(OSError, NotImplementedError):
            lock = FileLock(user_cache("turns", f"gpu {os.environ.get('CUDA_VISIBLE_DEVICES', 'all')}.lock"))
            turn.enter_context(lock.acquire(MOST_S))
        yield
