"""One process at a time measures on a GPU: engines that run side by side slow each other down by chance."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from rewriter.engines.user_cache import user_cache

MOST_S = 300.0
"""Longest wait, in seconds: half of what a run may take. Some builds of `tensorrt` take longer."""


@contextmanager
def gpu_turn() -> Iterator[None]:
    """Waits until no other process of this user measures on the same GPUs; an end of any kind ends a turn.

    After `MOST_S`, or where the lock's file cannot be written, it goes on all the same.
    """
    from filelock import FileLock

    with ExitStack() as turn:
        with suppress(
            OSError, NotImplementedError
        ):  # time up, a read-only folder, a file system without locks
            lock = FileLock(user_cache("turns", f"gpu {os.environ.get('CUDA_VISIBLE_DEVICES', 'all')}.lock"))
            turn.enter_context(lock.acquire(MOST_S))
        yield
