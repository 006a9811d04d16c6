"""Limits numpy's matrix products to one thread, for sequences of many small products."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_NAMES = (
    "scipy_openblas_{}_num_threads64_",  # numpy's own wheels
    "scipy_openblas_{}_num_threads",
    "openblas_{}_num_threads64_",  # the OpenBLAS of Linux distributions and of conda
    "openblas_{}_num_threads",
)


@dataclass(frozen=True)
class OpenBlas:
    """numpy's BLAS library; `name` is the pattern of its functions' names."""

    library: ctypes.CDLL
    name: str

    def threads(self) -> int:
        """Returns the number of threads."""
        return int(getattr(self.library, self.name.format("get"))())

    def limit(self, threads: int) -> None:
        """Set the number of threads."""
        getattr(self.library, self.name.format("set"))(threads)


def openblas() -> OpenBlas | None:
    """numpy's OpenBLAS; None if numpy uses another library (MKL, Accelerate, BLIS) or hides its functions."""
    core = getattr(sys.modules.get("numpy._core._multiarray_umath"), "__file__", None)
    if core is None:
        return None
    try:
        library = ctypes.CDLL(core)  # finds symbols of the libraries that it is linked with, too
    except OSError:
        return None
    found = (name for name in _NAMES if hasattr(library, name.format("set")))
    return next((OpenBlas(library, name) for name in found if hasattr(library, name.format("get"))), None)


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit numpy's OpenBLAS to one thread; other BLAS libraries are unchanged.

    OpenBLAS's idle threads spin, which costs more than they gain (docs/weights.md#constants).
    """
    found = openblas()
    if found is None:
        yield
        return
    threads = found.threads()
    found.limit(1)
    try:
        yield
    finally:
        found.limit(threads)
