"""Limits numpy's matrix products to one thread, for sequences of many small products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit the BLAS libraries of this process to one thread.

    OpenBLAS's idle threads spin, which costs more than they gain (docs/weights.md#constants).
    """
    with _controller().limit(limits=1, user_api="blas"):
        yield


@cache
def _controller() -> Any:
    """Finds the libraries that are loaded, once: numpy's is loaded by then."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()
