"""The memory that a model needs, by its size, and what the machine has."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rewriter.children import available_memory
from rewriter.model import data_files

GIB = 2**30

BASE_BYTES = 0.8 * GIB
"""For what does not grow with the weights. Measured on a model of 16 KB: 0.23 GiB; the rest is for samples
and activations, which the size of a file does not tell."""

BYTES_PER_BYTE = 8
"""Memory of `fix` for each byte of a model and its weights. Measured with all its processes (PSS) on chains
of MatMuls of 0.20 and 0.56 GiB, TensorRT-RTX's build included: 5.7 and 5.6."""

SHARE = 0.8
"""Of the free memory, that a batch may use."""


def needed(model: Path) -> int:
    """Estimated bytes that `fix` needs for a model; 0.8 GiB and 8 times the model with its weights."""
    return int(BASE_BYTES + BYTES_PER_BYTE * size(model))


def size(model: Path) -> int:
    """Bytes of a model with its weights; those of its file if it cannot be read."""
    try:
        weights = data_files(model)
    except Exception:
        weights = []
    return _sizes([model, *weights])


def _sizes(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files if file.is_file())


def budget() -> int:
    """Bytes that a batch may use on this machine; 0 if the system does not report them."""
    return int(SHARE * available_memory())
