"""Arrays between processes: a folder with one npy file for each tensor, memory-mapped when read."""

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path

import ml_dtypes
import numpy as np

from rewriter.base.errors import EngineError
from rewriter.ir.model import Array
from rewriter.runtime.recording.record import Shape as Shape
from rewriter.runtime.recording.record import Span as Span
from rewriter.runtime.recording.record import span_of

INDEX = "tensors.json"

SHAPE_LIKE = 16
"""Most elements of an integer input that can be a shape, an axis or a trip count: a build needs its value."""


class TensorWriter:
    """Writes tensors to a folder, which is made, one at a time; `close` makes them readable.

    Names need not be file names: the files are numbered, and `tensors.json` says which is which. Types that
    npy does not know (bfloat16 ...) are stored as their bits.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._index: dict[str, tuple[str, str]] = {}
        self._numbers = count()

    def add(self, name: str, value: Array) -> None:
        """Writes one tensor; the last of a name is the one that is read."""
        array, file = np.asarray(value), f"{next(self._numbers)}.npy"
        foreign = array.dtype.isbuiltin == 2  # 0 is NumPy's own, too: an instance that ONNX Runtime makes
        np.save(self.folder / file, array.view(f"u{array.itemsize}") if foreign else array)
        self._index[name] = (file, array.dtype.name)

    def close(self) -> Path:
        (self.folder / INDEX).write_text(json.dumps(self._index))
        return self.folder


def write_tensors(folder: Path, tensors: Mapping[str, Array]) -> Path:
    """Write tensors by name to a folder, which is made; returns it."""
    writer = TensorWriter(folder)
    for name, value in tensors.items():
        writer.add(name, value)
    return writer.close()


def read_tensors(folder: Path) -> dict[str, Array]:
    """The tensors of a folder by name, read-only and memory-mapped; an EngineError if there are none."""
    index = folder / INDEX
    if not index.is_file():
        hint = "the process that writes them failed: see its log"
        raise EngineError("no tensors were written", where=str(folder), hint=hint)
    return dict(StoredTensors(folder))


class StoredTensors(Mapping[str, Array]):
    """The tensors of a folder, each mapped when it is read: a process may have a thousand open files."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._files = folder, json.loads((folder / INDEX).read_text())

    def __getitem__(self, name: str) -> Array:
        file, dtype = self._files[name]
        header_only = np.load(self._folder / file, mmap_mode="r")
        array: Array = header_only if header_only.size else np.load(self._folder / file)
        return array if array.dtype.name == dtype else array.view(getattr(ml_dtypes, dtype))

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def spans_of(samples: Iterable[Mapping[str, Array]]) -> dict[str, Span]:
    """Each input's smallest size of every axis, middle shape by size, and largest size of every axis."""
    shapes: dict[str, list[Shape]] = {}
    for feeds in samples:
        for name, array in feeds.items():
            shapes.setdefault(name, []).append(array.shape)
    return {name: span_of(several) for name, several in shapes.items()}


def values_of(samples: Iterable[Mapping[str, Array]]) -> dict[str, Span]:
    """The smallest, middle and largest value of each element of inputs that could be shapes themselves."""
    seen: dict[str, list[Array]] = {}
    for feeds in samples:
        for name, array in feeds.items():
            if array.dtype.kind in "iu" and array.ndim <= 1 and array.size <= SHAPE_LIKE:
                seen.setdefault(name, []).append(array.reshape(-1))
    sorted_values = {
        name: np.sort(np.stack(arrays), axis=0).tolist()
        for name, arrays in seen.items()
        if len({array.size for array in arrays}) == 1
    }
    return {
        name: (tuple(rows[0]), tuple(rows[len(rows) // 2]), tuple(rows[-1]))
        for name, rows in sorted_values.items()
    }


def write_samples(folder: Path, samples: Iterable[Mapping[str, Array]]) -> tuple[Path, ...]:
    """Write feeds, one folder for each; an iterable is read once, one sample in memory at a time."""
    return tuple(write_tensors(folder / f"{number:04d}", feeds) for number, feeds in enumerate(samples))
