"""Arrays in npy and npz files, described by their headers and read when they are needed.

A header can claim any shape, and a small archive can expand to any size. Names, types and shapes are
therefore known, and can be refused, before an array is read.
"""

from __future__ import annotations

import io
import math
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from rewriter.ir.errors import InputsError
from rewriter.ir.model import Array

SUFFIX = ".npy"
"""`np.savez` adds it to the names of arrays."""

Opened = Callable[[], AbstractContextManager[tuple[IO[bytes], int]]]
"""Opens the file of one array; yields the stream and its size in bytes."""


@dataclass(frozen=True)
class StoredArray:
    """An array in a file: `np.asarray` reads it.

    Attributes:
        where: File and array, for messages.
        shape, dtype: As the header claims them; the file is large enough for both.
    """

    where: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    _open: Opened

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Reads the array.

        Raises:
            InputsError: the file is broken, or memory does not suffice.
        """
        with explained(self.where), self._open() as (stream, _):
            return np.asarray(npy.read_array(stream, allow_pickle=False), dtype)


class Archive(Mapping[str, StoredArray]):
    """The arrays of an npz file by name; the names come from the directory of the archive alone."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with explained(str(path)):
            if not zipfile.is_zipfile(path):
                raise InputsError(
                    "not an npz archive, or a truncated one", where=str(path), hint="write it with np.savez"
                )
            with zipfile.ZipFile(path) as archive:
                self._members = {name.removesuffix(SUFFIX): name for name in archive.namelist()}

    def __getitem__(self, name: str) -> StoredArray:
        member = self._members[name]

        @contextmanager
        def opened() -> Iterator[tuple[IO[bytes], int]]:
            with zipfile.ZipFile(self._path) as archive, archive.open(member) as stream:
                yield stream, archive.getinfo(member).file_size

        return _described(opened, f"{self._path}: array {name!r}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)


def npy_file(source: Path | bytes, where: str = "") -> StoredArray:
    """The array in an npy file, or in the bytes of one.

    Raises:
        InputsError: the file cannot be read, or its header claims more than it holds.
    """

    @contextmanager
    def opened() -> Iterator[tuple[IO[bytes], int]]:
        with io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as stream:
            size = stream.seek(0, io.SEEK_END)
            stream.seek(0)
            yield stream, size

    return _described(opened, where or str(source))


def _described(opened: Opened, where: str) -> StoredArray:
    with explained(where), opened() as (stream, size):
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
        version = npy.read_magic(stream)
        if version not in (*read, (3, 0)):
            raise ValueError(f"an npy file of version {version[0]}.{version[1]} is not known")
        shape, _, dtype = read.get(version, npy.read_array_header_2_0)(stream)
        if dtype.hasobject:
            raise _pickled(where)
        claimed, held = math.prod(shape) * dtype.itemsize, size - stream.tell()
        if min(shape, default=0) < 0 or claimed > held:
            raise InputsError(
                f"its header claims the shape {list(shape)} of {dtype}, which is {claimed} bytes; "
                f"the file holds {held}",
                where=where,
                hint="write it again",
            )
        return StoredArray(where, shape, dtype, opened)


BROKEN = (
    ValueError,
    OSError,
    EOFError,
    RuntimeError,  # encrypted members, and NotImplementedError for unknown compression
    MemoryError,
    OverflowError,
    SyntaxError,
    tokenize.TokenError,  # of the header, which numpy parses as Python
    zipfile.BadZipFile,
    zlib.error,
)
"""What zipfile and numpy raise for files that are not what they claim to be."""


@contextmanager
def explained(where: str) -> Iterator[None]:
    """Turns the errors that libraries raise for a broken file into an InputsError."""
    try:
        yield
    except BROKEN as error:
        if "object array" in str(error).lower():
            raise _pickled(where) from error
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputsError(f"it cannot be read: {what}", where=where, hint="write it again") from error


def _pickled(where: str) -> InputsError:
    return InputsError(
        "it holds Python objects (pickled data), which are not loaded because they can run code",
        where=where,
        hint="save plain arrays: np.savez(file, **{name: np.asarray(value)})",
    )
