"""Files with the weights of models: which one is new, and which old one may go.

Readers of a model find its weights by name and offset. Data is therefore never changed in place: new
weights go into a new file, and the model that names it replaces the old model in one step.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import IO

import numpy as np
import onnx

from rewriter.ir.errors import ModelError
from rewriter.ir.model.external_source import location_of
from rewriter.ir.model.output_files import take_permissions
from rewriter.ir.model.reading import read_proto
from rewriter.ir.model.tensors import Array

PAGE = 4096
"""Tensors start at multiples of it, so that readers can map them."""

SEARCHED_BYTES = 8 * 2**30
"""Most bytes of a folder that are searched for the name of a data file."""

State = tuple[int, int, int]
"""Inode, size in bytes, and time of the last change in ns of a file."""

LARGEST_MODEL = 2**31
"""A larger file is no model, since it is no protobuf message."""


def write_data(proto: onnx.ModelProto, weights: Mapping[str, Array], target: Path) -> Path:
    """Writes the weights to a new file for the model `target`, and points the initializers of `proto` at it.

    Nothing in the folder uses the name of the file. If it cannot be written, nothing of it stays.
    """
    path, stream = _created(target)
    with removed_on_failure(path, target), stream:
        for tensor in proto.graph.initializer:
            if tensor.name in weights:
                _append(stream, tensor, weights[tensor.name], path.name)
        stream.write(_signature(target))
        take_permissions(path, target)
    return path


@contextmanager
def removed_on_failure(data: Path, target: Path) -> Iterator[None]:
    """Removes a new data file if the block fails before the model file `target` names it."""
    try:
        yield
    except BaseException:
        if data.name not in _read_locations(target):  # not from memory: what it names must never be removed
            data.unlink(missing_ok=True)
        raise


def _append(stream: IO[bytes], tensor: onnx.TensorProto, array: Array, location: str) -> None:
    stream.write(b"\0" * (-stream.tell() % PAGE))
    offset = stream.tell()
    stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    del tensor.external_data[:]
    for key, value in (("location", location), ("offset", offset), ("length", array.nbytes)):
        tensor.external_data.add(key=key, value=str(value))


def owned_data(target: Path) -> dict[Path, State]:
    """The data files that `rewriter` wrote for the model file `target`, as it is now, and their states."""
    files = (target.parent / location for location in locations(target) if Path(location).name == location)
    return {file: state for file in files if (state := _state(file)) and _signed_for(file, target)}


def remove_unused(files: Mapping[Path, State], target: Path) -> None:
    """Removes data files that no model in the folder names; a file that cannot be removed stays.

    Another process that writes the same model may have removed one, and be writing a new file of its name:
    what is not in its old state stays.
    """
    for file, state in files.items():
        others = (other for other in target.parent.iterdir() if other != file)
        if not _named(file.name, others, if_unknown=True) and _state(file) == state:
            with suppress(OSError):  # Windows keeps files that are mapped
                file.unlink()


def _state(file: Path) -> State | None:
    """Says whether a file is still the one that it was; None if it is gone."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def locations(path: Path) -> set[str]:
    """The locations of external data that the model at `path` names; none if it is no model."""
    state = _state(path)
    return set() if state is None else set(_locations(path, state))


@lru_cache(maxsize=16)
def _locations(path: Path, _seen: State) -> frozenset[str]:
    """The locations that a file names, kept for as long as its inode, size and time stay the same."""
    return _read_locations(path)


def _read_locations(path: Path) -> frozenset[str]:
    if not path.is_file():
        return frozenset()
    try:
        proto = read_proto(path)
    except ModelError:
        return frozenset()
    named = (location_of(t) for t in proto.graph.initializer if t.external_data)
    return frozenset(location for location in named if location)


def data_files(model: Path) -> list[Path]:
    """The files that hold the weights of a model beside it."""
    return [model.parent / location for location in sorted(locations(model))]


def mapped_files(weights: Iterable[Array]) -> set[Path]:
    """The files that arrays are mapped from."""
    names = {str(array.filename) for array in weights if isinstance(array, np.memmap) and array.filename}
    return {Path(os.path.realpath(name)) for name in names}


def _created(target: Path) -> tuple[Path, IO[bytes]]:
    """`<target>.data`, or the first numbered one that is free, and created here."""
    models = [target, *target.parent.glob("*.onnx")]
    name = os.fsencode(target.name).decode(errors="replace").replace("\N{REPLACEMENT CHARACTER}", "_")
    for number in count():  # the model names the file, and its text is UTF-8
        path = target.with_name(f"{name}{f'.{number}' if number else ''}.data")
        if os.path.lexists(path) or _named(path.name, models, if_unknown=False):
            continue
        with suppress(FileExistsError):  # another process was faster
            return path, path.open("xb")
    raise AssertionError("there is always a further number")


def _signature(target: Path) -> bytes:
    """The last bytes of a data file, which no tensor uses: they say whose it is."""
    return b"\nexternal data, written by rewriter for " + os.fsencode(target.name) + b"\n"


def _signed_for(file: Path, target: Path) -> bool:
    signature = _signature(target)
    try:
        with file.open("rb") as stream:
            stream.seek(-len(signature), os.SEEK_END)
            return stream.read() == signature
    except OSError:
        return False


def _named(name: str, files: Iterable[Path], *, if_unknown: bool) -> bool:
    """True if one of the files holds the name; `if_unknown` if there is too much to read, or no right to."""
    left, text = SEARCHED_BYTES, os.fsencode(name)
    for file in files:
        try:
            size = file.stat().st_size if file.is_file() else 0
            if not 0 < size < LARGEST_MODEL:
                continue
            left -= size
            if left < 0:
                return if_unknown
            if _holds(file, text):
                return True
        except FileNotFoundError:
            continue  # it was removed meanwhile
        except OSError:
            if if_unknown:
                return True
    return False


def _holds(file: Path, text: bytes) -> bool:
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as view:
        return view.find(text) >= 0
