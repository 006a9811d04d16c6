"""One process at a time measures on a GPU: engines that run side by side are both slow, and by chance."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from rewriter.engines.user_cache import user_cache


@contextmanager
def gpu_turn() -> Iterator[None]:
    """Waits until no other process of this user measures on the same GPUs; an end of any kind ends a turn.

    Where the lock's file cannot be written, nothing waits.
    """
    from filelock import FileLock

    with ExitStack() as turn:
        try:
            lock = FileLock(user_cache("turns", f"gpu {os.environ.get('CUDA_VISIBLE_DEVICES', 'all')}.lock"))
            turn.enter_context(lock)
        except (OSError, NotImplementedError):  # a folder that is read-only, a file system without locks
            pass
        yield
