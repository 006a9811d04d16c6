"""One thread for numpy's matrix products, while many small ones follow each other."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_NAMES = ("scipy_openblas_{}_num_threads64_", "scipy_openblas_{}_num_threads")
"""In numpy's own wheels."""

_PLAIN = ("openblas_{}_num_threads64_", "openblas_{}_num_threads")
"""In the OpenBLAS of distributions and of conda, which numpy is linked with there."""


@dataclass(frozen=True)
class OpenBlas:
    """The library that numpy computes with. `name` is what its functions are called, with a gap."""

    library: ctypes.CDLL
    name: str

    def threads(self) -> int:
        """How many threads a product may have."""
        return int(getattr(self.library, self.name.format("get"))())

    def limit(self, threads: int) -> None:
        """Let a product have that many."""
        getattr(self.library, self.name.format("set"))(threads)


def openblas() -> OpenBlas | None:
    """numpy's OpenBLAS; None if it has another one (MKL, Accelerate, BLIS), or hides its functions."""
    core = getattr(sys.modules.get("numpy._core._multiarray_umath"), "__file__", None)
    if core is None:
        return None
    try:
        library = ctypes.CDLL(core)  # names are looked for in what it is linked with, too
    except OSError:
        return None
    found = (name for name in (*_NAMES, *_PLAIN) if hasattr(library, name.format("set")))
    return next((OpenBlas(library, name) for name in found if hasattr(library, name.format("get"))), None)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let numpy's OpenBLAS compute in one thread inside; what else numpy may be built with stays as it is.

    OpenBLAS's idle threads spin. On two cores that other processes wanted, too, the rounding of a ViT-S took
    30 s of CPU with two threads and 7 s with one.
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
