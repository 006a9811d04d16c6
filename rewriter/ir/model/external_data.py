"""External data: the file, the offset and the length that a tensor names, and new files of weights.

Readers of a model find its weights by name and offset. Data is therefore never changed in place: new
weights go into a new file, and the model that names it replaces the old model in one step.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import IO

import numpy as np
import onnx

from rewriter.ir.errors import ModelError
from rewriter.ir.model.output_files import take_permissions
from rewriter.ir.model.tensors import PACKED_TYPES, Array, frozen
from rewriter.ir.model.validation import byte_size, check_tensor, read_proto, type_name

AS_ONE = "export the model again, or copy it again together with its data"

MOST_MAPPED = 256
"""Data files of a model that are mapped. Each mapping holds an open file, and a process may have 1,024 by
default; some exporters write a file for each tensor."""

PAGE = 4096
"""Tensors start at multiples of it, so that readers can map them."""


# -- reading --------------------------------------------------------------------------------------


def map_external(tensor: onnx.TensorProto, model: Path | None, opened: dict[Path, Array]) -> Array:
    """The data of a tensor, mapped from its file and read-only; packed types as bytes.

    Args:
        model: The file of the model, which the location is relative to; None for a proto without a file.
        opened: The content of the files that the model's tensors named so far; a new one is added.

    Raises:
        ModelError: the file is missing, outside the model's folder or too short, or the tensor names an
            impossible place in it.
    """
    file, offset, length = _place(tensor, model, f"{model or 'model'}: initializer {tensor.name!r}")
    dtype, dims = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type), tuple(tensor.dims)
    if tensor.data_type in PACKED_TYPES:
        dtype, dims = np.dtype(np.uint8), (length,)
    if not length:
        return frozen(np.zeros(dims, dtype))
    if file not in opened:
        mapped = len(opened) < MOST_MAPPED
        opened[file] = np.memmap(file, np.uint8, "r") if mapped else frozen(np.fromfile(file, np.uint8))
    return opened[file][offset : offset + length].view(dtype).reshape(dims)


def _place(tensor: onnx.TensorProto, model: Path | None, where: str) -> tuple[Path, int, int]:
    """The file of a tensor's data, the first byte in it, and the number of bytes."""
    if model is None:
        raise ModelError(
            "its data is in an external file, and a ModelProto does not say where",
            where=where,
            hint="pass the path of the model instead, or load it with its data",
        )
    check_tensor(tensor, where)
    needed = byte_size(tensor)
    if needed is None:
        raise ModelError("strings cannot be in external data", where=where, hint="keep them in the model")
    entries = _entries(tensor)
    file = _file(entries.get("location", ""), model, where)
    offset, length = (
        _number(entries, key, least, where) for key, least in (("offset", 0), ("length", needed))
    )
    if length != needed:
        shape = f"{list(tensor.dims)} of {type_name(tensor)}"
        text = f"its data has {length} bytes, but its shape {shape} needs {needed}"
        raise ModelError(text, where=where, hint=AS_ONE)
    size = file.stat().st_size
    if offset + needed > size:
        text = f"it has {size} bytes, and the tensor ends at {offset + needed}"
        raise ModelError(f"external data file {file.name!r} is too short: {text}", where=where, hint=AS_ONE)
    return file, offset, needed


def _entries(tensor: onnx.TensorProto) -> dict[str, str]:
    """The entries by key; a value that is not UTF-8, which protobuf yields as bytes, is no value."""
    return {e.key: e.value for e in tensor.external_data if isinstance(e.value, str)}


def _number(entries: dict[str, str], key: str, missing: int, where: str) -> int:
    """The entry as a number of bytes."""
    text = entries.get(key, str(missing))
    if not (text.isascii() and text.isdecimal() and len(text) < 20):  # 2**63 has 19 digits
        what = f"its {key} in the external data is {text[:40]!r}, not a number of bytes"
        raise ModelError(what, where=where, hint=AS_ONE)
    return int(text)


def _file(location: str, model: Path, where: str) -> Path:
    """The file at a location, which is below the model's folder."""
    if Path(location).is_absolute() or ".." in Path(location).parts:
        raise ModelError(
            f"external data outside the model's folder: {location}",
            where=where,
            hint="put the file beside the model, and save the model with its name alone",
        )
    file, shown = model.parent / location, location if len(location) <= 255 else f"{location[:60]}..."
    try:
        exists = file.is_file()
    except (OSError, ValueError) as error:  # the name is too long
        text = f"external data file {shown!r} cannot be opened: {error.__class__.__name__}"
        raise ModelError(text, where=where, hint=AS_ONE) from error
    if not exists:
        hint = f"put it beside the model, in {model.parent}"
        raise ModelError(f"external data file {shown!r} is missing", where=where, hint=hint)
    if not _inside(file, model):
        raise ModelError(
            f"external data file {location!r} is a link out of the model's folder, to {file.resolve()}",
            where=where,
            hint="put the file itself beside the model, if you trust the link",
        )
    return file


def _inside(file: Path, model: Path) -> bool:
    """True if a data file, its links followed, is below the folder of the model or of the model's own target.

    The second is the layout of download caches: a folder of links to files that lie side by side.
    """
    real = Path(os.path.realpath(file))
    folders = (os.path.realpath(model.parent), Path(os.path.realpath(model)).parent)
    return any(real.is_relative_to(folder) for folder in folders)


def data_files(model: Path) -> list[Path]:
    """The files that hold the weights of the model file `model`, beside it; none if it is no model."""
    try:
        proto = read_proto(model)
    except ModelError:
        return []
    locations = {_entries(t).get("location", "") for t in proto.graph.initializer if t.external_data}
    return [model.parent / location for location in sorted(filter(None, locations))]


# -- writing --------------------------------------------------------------------------------------


@contextmanager
def new_data(proto: onnx.ModelProto, weights: Mapping[str, Array], target: Path) -> Iterator[None]:
    """Writes the weights to a new file for the model `target`, and points the initializers of `proto` at it.

    The block replaces the model. If it fails before, nothing of the new file stays.
    """
    path, stream = _created(target)
    try:
        with stream:
            for tensor in proto.graph.initializer:
                if tensor.name in weights:
                    _append(stream, tensor, weights[tensor.name], path.name)
            stream.write(_signature(target))
            take_permissions(path, target)
        yield
    except BaseException:
        if path not in data_files(target):  # what the model names must never be removed
            path.unlink(missing_ok=True)
        raise


def _append(stream: IO[bytes], tensor: onnx.TensorProto, array: Array, location: str) -> None:
    stream.write(b"\0" * (-stream.tell() % PAGE))
    offset = stream.tell()
    stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    del tensor.external_data[:]
    for key, value in (("location", location), ("offset", offset), ("length", array.nbytes)):
        tensor.external_data.add(key=key, value=str(value))


def _created(target: Path) -> tuple[Path, IO[bytes]]:
    """`<target>.data`, or the first numbered one that is free, created here."""
    name = os.fsencode(target.name).decode(errors="replace").replace("\N{REPLACEMENT CHARACTER}", "_")
    for number in count():  # the model names the file, and its text is UTF-8
        path = target.with_name(f"{name}{f'.{number}' if number else ''}.data")
        with suppress(OSError):  # a neighbour that cannot be read
            if _is_named(path):
                continue  # its data is missing, and would be found with other weights in it
        with suppress(FileExistsError):
            return path, path.open("xb")
    raise AssertionError("there is always a further number")


def _signature(target: Path) -> bytes:
    """The last bytes of a data file, which no tensor uses: they say whose it is."""
    return b"\nexternal data, written by rewriter for " + os.fsencode(target.name) + b"\n"


def owned_data(target: Path) -> list[Path]:
    """The data files beside the model file `target` that `rewriter` wrote for it, as it is now."""
    return [file for file in data_files(target) if file.parent == target.parent and _is_signed(file, target)]


def _is_signed(file: Path, target: Path) -> bool:
    signature = _signature(target)
    try:
        with file.open("rb") as stream:
            stream.seek(-len(signature), os.SEEK_END)
            return stream.read() == signature
    except OSError:
        return False


def remove_unused(files: Iterable[Path]) -> None:
    """Removes data files that no model of their folder names; one that cannot be removed stays."""
    for file in files:
        with suppress(OSError):  # Windows keeps files that are mapped; a model may not be readable
            if not _is_named(file):
                file.unlink()


def _is_named(file: Path) -> bool:
    """True if a model of the file's folder holds its name."""
    for model in file.parent.glob("*.onnx"):
        if model.is_file() and model.stat().st_size:
            with model.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as view:
                if view.find(os.fsencode(file.name)) >= 0:
                    return True
    return False
