"""One process at a time measures on a GPU: engines that run side by side slow each other down by chance."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from rewriter.runtime.engines.user_cache import user_cache

MOST_S = 60.0
"""Longest wait, in seconds, which is a part of the time limit of a build or run. Runs take seconds; who waits
for a long build of `tensorrt` measures beside it in the end."""


@contextmanager
def gpu_turn() -> Iterator[None]:
    """Waits until no other process of this user with the same `CUDA_VISIBLE_DEVICES` measures.

    A process that ends, however it does, gives its turn back. After `MOST_S`, or where the lock's file cannot
    be written, this one goes on all the same.
    """
    from filelock import FileLock

    with ExitStack() as turn:
        # time is up, or the folder is read-only; the file system has no locks
        with suppress(OSError, NotImplementedError):
            lock = FileLock(user_cache("turns", f"gpu {os.environ.get('CUDA_VISIBLE_DEVICES', 'all')}.lock"))
            turn.enter_context(lock.acquire(MOST_S))
        yield
