"""The user's cache folder, timings of kernels in it, and the GPU's turn.

`tensorrt` keeps timings of kernels between builds, one file for each library version and GPU: a build that
finds its kernels there is quicker and chooses the same ones again. TensorRT-RTX has none: it compiles on the
GPU that it runs on, and asking for one makes a build without a GPU fail.
"""

import contextlib
import errno
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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

    Raises:
        OSError: there is no such folder, and none can be made.
    """
    path = _root().joinpath(*(re.sub(r"[^\w.+-]+", "_", part) for part in parts))
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _root() -> Path:
    if folder := os.environ.get(VARIABLE):
        return Path(folder)
    from platformdirs import user_cache_path

    # of a user without HOME and without an entry among the users: RuntimeError, or ~ in the working folder
    with contextlib.suppress(RuntimeError):
        if (root := user_cache_path("rewriter", appauthor=False)).is_absolute():
            return root
    raise OSError(errno.ENOENT, "this user has no home folder")


def obstacle() -> str:
    """Why nothing can be kept in the cache folder, and what to do about it; "" if it can."""
    try:
        with tempfile.TemporaryFile(dir=user_cache("any").parent) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        named = f"{error.filename}: " if error.filename else ""
        return f"{named}{error.strerror or error}; {VARIABLE} may name another folder"
    return ""


@contextlib.contextmanager
def timing_cache(trt: Any, config: Any) -> Iterator[None]:
    """Sets the timing cache of a builder's config, and keeps it at the end, if the library has any."""
    gpu = nvidia_driver.gpu()
    if trt.__name__ != "tensorrt" or gpu is None:
        yield
        return
    path, stored = None, b""
    with contextlib.suppress(OSError):
        path = user_cache("timing", f"{trt.__name__} {trt.__version__} {gpu.name}.cache")
        stored = path.read_bytes() if path.is_file() else b""
    taken = config.set_timing_cache(config.create_timing_cache(stored), False)
    yield
    if taken and path is not None:
        with contextlib.suppress(OSError), replacing(path) as temporary:
            temporary.write_bytes(memoryview(config.get_timing_cache().serialize()))


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
