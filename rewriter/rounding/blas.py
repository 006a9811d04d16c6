"""One thread for numpy's matrix products, while many small ones follow each other."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_GET, _SET = "scipy_openblas_get_num_threads64_", "scipy_openblas_set_num_threads64_"
"""Names in the OpenBLAS that numpy's wheels hold."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Let numpy's OpenBLAS compute in one thread inside; what else numpy may be built with stays as it is.

    OpenBLAS's idle threads spin. On two cores that other processes wanted, too, the rounding of a ViT-S took
    30 s of CPU with two threads and 7 s with one.
    """
    core = sys.modules["numpy._core._multiarray_umath"].__file__  # it is linked with the OpenBLAS
    library = ctypes.CDLL(core)
    if not hasattr(library, _SET):
        yield
        return
    threads = int(getattr(library, _GET)())
    getattr(library, _SET)(1)
    try:
        yield
    finally:
        getattr(library, _SET)(threads)
