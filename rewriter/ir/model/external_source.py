"""Reads external data: the file, the offset and the length that a tensor names, checked and mapped."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from rewriter.ir.errors import ModelError
from rewriter.ir.model.tensors import PACKED_TYPES, Array, frozen
from rewriter.ir.model.validation import byte_size, check_tensor, type_name

AS_ONE = "export the model again, or copy it again together with its data"

MOST_MAPPED = 256
"""Data files of a model that are mapped. Each mapping holds an open file, and a process may have 1,024 by
default; some exporters write a file for each tensor."""


@dataclass(frozen=True)
class ExternalSource:
    """A tensor's data: a file, the first byte in it, and the number of bytes."""

    file: Path
    offset: int
    length: int


def location_of(tensor: onnx.TensorProto) -> str:
    """The file that a tensor names for its data, as the model spells it; "" if it names none."""
    return _entries(tensor).get("location", "")


def map_external(tensor: onnx.TensorProto, model: Path | None, opened: dict[Path, Array]) -> Array:
    """The data of a tensor, mapped from its file and read-only; packed types as bytes.

    Args:
        model: The file of the model, which the location is relative to; None for a proto without a file.
        opened: The content of the files that the model's tensors named so far; a new one is added.

    Raises:
        ModelError: the file is missing, outside the model's folder or too short, or the tensor names an
            impossible place in it.
    """
    source = _source(tensor, model, f"{model or 'model'}: initializer {tensor.name!r}")
    dtype, dims = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type), tuple(tensor.dims)
    if tensor.data_type in PACKED_TYPES:
        dtype, dims = np.dtype(np.uint8), (source.length,)
    if not source.length:
        return frozen(np.zeros(dims, dtype))
    if source.file not in opened:
        opened[source.file] = _content(source.file, len(opened))
    return opened[source.file][source.offset : source.offset + source.length].view(dtype).reshape(dims)


def _content(file: Path, mapped: int) -> Array:
    """The bytes of a file: mapped, or read if `mapped` others are open already."""
    if mapped < MOST_MAPPED:
        return np.memmap(file, np.uint8, "r")
    return frozen(np.fromfile(file, np.uint8))


def _source(tensor: onnx.TensorProto, model: Path | None, where: str) -> ExternalSource:
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
    offset = _number(entries, "offset", 0, where)
    length = _number(entries, "length", needed, where)
    if length != needed:
        shape = f"{list(tensor.dims)} of {type_name(tensor)}"
        raise ModelError(f"its data has {length} bytes, but its shape {shape} needs {needed}", where=where,
                         hint=AS_ONE)  # fmt: skip
    size = file.stat().st_size
    if offset + needed > size:
        raise ModelError(
            f"external data file {file.name!r} is too short: it has {size} bytes, and the tensor ends at "
            f"{offset + needed}",
            where=where,
            hint=AS_ONE,
        )
    return ExternalSource(file, offset, needed)


def _entries(tensor: onnx.TensorProto) -> dict[str, str]:
    """The entries by key; a value that is not UTF-8, which protobuf yields as bytes, is no value."""
    return {e.key: e.value for e in tensor.external_data if isinstance(e.value, str)}


def _number(entries: dict[str, str], key: str, missing: int, where: str) -> int:
    """The entry as a number of bytes."""
    text = entries.get(key, str(missing))
    if not (text.isascii() and text.isdecimal() and len(text) < 20):  # 2**63 has 19 digits
        raise ModelError(f"its {key} in the external data is {text[:40]!r}, not a number of bytes",
                         where=where, hint=AS_ONE)  # fmt: skip
    return int(text)


def _file(location: str, model: Path, where: str) -> Path:
    """The file at a location, which is below the model's folder."""
    if Path(location).is_absolute() or ".." in Path(location).parts:
        raise ModelError(
            f"external data outside the model's folder: {location}",
            where=where,
            hint="put the file beside the model, and save the model with its name alone",
        )
    file = model.parent / location
    try:
        found = file.is_file()
    except (OSError, ValueError) as error:  # the name is too long
        raise ModelError(
            f"external data file {_shortened(location)!r} cannot be opened: {error.__class__.__name__}",
            where=where,
            hint=AS_ONE,
        ) from error
    if not found:
        raise ModelError(
            f"external data file {_shortened(location)!r} is missing",
            where=where,
            hint=f"put it beside the model, in {model.parent}",
        )
    if not _inside(file, model):
        raise ModelError(
            f"external data file {location!r} is a link out of the model's folder, to {file.resolve()}",
            where=where,
            hint="put the file itself beside the model, if you trust the link",
        )
    return file


def _shortened(name: str) -> str:
    return name if len(name) <= 255 else name[:60] + "..."


def _inside(file: Path, model: Path) -> bool:
    """True if a data file, its links followed, is below the folder of the model or of the model's own target.

    The second is the layout of download caches: a folder of links to files that lie side by side.
    """
    real = Path(os.path.realpath(file))
    folders = (os.path.realpath(model.parent), Path(os.path.realpath(model)).parent)
    return any(real.is_relative_to(folder) for folder in folders)
