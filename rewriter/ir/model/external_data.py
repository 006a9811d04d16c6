"""External data: the file, the offset and the length that a tensor names, and new files of weights.

Readers of a model find its weights by name and offset. Data is therefore never changed in place: new
weights go into a new file, and the model that names it replaces the old model in one step. Of the old files,
those that we wrote go, if no model in the folder names them any more.
"""

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from mmap import ACCESS_READ, mmap
from pathlib import Path

import numpy as np
import onnx

from rewriter.base.errors import ModelError
from rewriter.ir.model.output_files import abandoned, files_matching, reserved, take_permissions
from rewriter.ir.model.tensors import PACKED_TYPES, Array, frozen
from rewriter.ir.model.validation import byte_size, check_tensor, read_proto

AS_ONE = "export the model again, or copy it again together with its data"

MOST_MAPPED = 256
"""Data files of a model that are mapped. Each mapping holds an open file, and a process may have 1,024 by
default; some exporters write a file for each tensor."""

PAGE = 4096  # tensors start at multiples of it, so that readers can map them


def map_external(tensor: onnx.TensorProto, model: Path | None, opened: dict[Path, Array]) -> Array:
    """The data of a tensor, mapped from its file and read-only; packed types as bytes.

    Args:
        model: The file of the model, which the location is relative to; None for a proto without a file.
        opened: The content of the files that the model's tensors named so far; a new one is added.

    Raises:
        ModelError: the file is missing, outside the model's folder or too short, or the tensor names an
            impossible place in it.
    """
    where = f"{model or 'model'}: initializer {tensor.name!r}"
    if model is None:
        what = "its data is in an external file, and a ModelProto does not say where"
        hint = "pass the path of the model instead, or load it with its data"
        raise ModelError(what, where=where, hint=hint)
    check_tensor(tensor, where)
    needed, entries = byte_size(tensor), _entries(tensor)
    if needed is None:
        raise ModelError("strings cannot be in external data", where=where, hint="keep them in the model")
    file = _file(entries.get("location", ""), model, where)
    offset, length, size = entries.get("offset", "0"), entries.get("length", str(needed)), file.stat().st_size
    number = offset.isdecimal() and len(offset) < 20  # 2**63 has 19 digits
    if not number or length != str(needed) or int(offset) + needed > size:
        text = f"its data would be {length} bytes from byte {offset[:40]} of {file.name!r} on"
        text += f", which has {size}; its shape {list(tensor.dims)} needs {needed}"
        raise ModelError(text, where=where, hint=AS_ONE)
    start, dtype = int(offset), onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    if file not in opened and needed:
        mapped = len(opened) < MOST_MAPPED  # as plain arrays, which are pickled without a copy
        content = np.asarray(np.memmap(file, np.uint8, "r")) if mapped else np.fromfile(file, np.uint8)
        opened[file] = frozen(content)
    data = opened[file][start : start + needed] if needed else frozen(np.zeros(0, np.uint8))
    return data if tensor.data_type in PACKED_TYPES else data.view(dtype).reshape(tuple(tensor.dims))


def _entries(tensor: onnx.TensorProto) -> dict[str, str]:
    """The entries by key; a value that is not UTF-8, which protobuf yields as bytes, is no value."""
    return {e.key: e.value for e in tensor.external_data if isinstance(e.value, str)}


def _file(location: str, model: Path, where: str) -> Path:
    """The file at a location, below the folder of the model or of the file that the model links to.

    Download caches are laid out like that: a folder of links to files that lie side by side.
    """
    if Path(location).is_absolute() or ".." in Path(location).parts:
        hint = "put the file beside the model, and save the model with the file's name and no folder"
        raise ModelError(f"external data outside the model's folder: {location}", where=where, hint=hint)
    file, shown = model.parent / location, location if len(location) <= 255 else f"{location[:60]}..."
    if not _exists(file):
        hint = f"put it beside the model, in {model.parent}"
        raise ModelError(f"external data file {shown!r} is missing", where=where, hint=hint)
    folders = (os.path.realpath(model.parent), Path(os.path.realpath(model)).parent)
    if not any(Path(os.path.realpath(file)).is_relative_to(folder) for folder in folders):
        what = f"external data file {location!r} is a link out of the model's folder, to {file.resolve()}"
        hint = "put the file itself beside the model, if you trust the link"
        raise ModelError(what, where=where, hint=hint)
    return file


def _exists(file: Path) -> bool:
    return os.path.isfile(file)  # noqa: PTH113 - False, no error, where the name is too long or has a NUL


def data_files(model: Path) -> list[Path]:
    """The files with the weights of the model file `model`, where they are there; none if it is no model."""
    try:
        proto = read_proto(model)
    except ModelError:
        return []
    locations = {_entries(t).get("location", "") for t in proto.graph.initializer if t.external_data}
    return [file for location in sorted(filter(None, locations)) if _exists(file := model.parent / location)]


OURS = b"Weights of an ONNX model, written by rewriter\n"
"""Start of each data file of ours: exporters give their files the same names."""

READING_S = 1.0
"""Seconds that old data stays after its model was replaced: some readers have the old model already."""

MODEL_STARTS = b"\x08\x12\x1a\x22\x28\x32\x3a\x42\x72\xa2\xca"
"""First byte of a ModelProto: the tag of its first field. Copies of models may have any suffix."""


@contextmanager
def new_data(proto: onnx.ModelProto, weights: Mapping[str, Array], target: Path) -> Iterator[None]:
    """Writes the weights to a new file for the model `target`, and points the initializers of `proto` at it.

    The block replaces the model. If it fails before, nothing of the new file stays.
    """
    name = _data_name(target)
    numbered = (target.with_name(f"{name}{f'.{number}' if number else ''}.data") for number in count())
    with reserved(numbered, OURS) as path:
        try:
            with path.open("r+b") as stream:
                stream.seek(len(OURS))
                for tensor in (t for t in proto.graph.initializer if t.name in weights):
                    array = weights[tensor.name]
                    stream.write(b"\0" * (-stream.tell() % PAGE))
                    location = {"location": path.name, "offset": stream.tell(), "length": array.nbytes}
                    stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
                    del tensor.external_data[:]
                    for key, value in location.items():
                        tensor.external_data.add(key=key, value=str(value))
            take_permissions(path, target)
            yield
        except BaseException:
            if path not in data_files(target):  # what the model names must never be removed
                path.unlink(missing_ok=True)
            raise


def _data_name(target: Path) -> str:
    """The name of a model as its data has it: the model names the file, and its text is UTF-8."""
    return os.fsencode(target.name).decode(errors="replace").replace("\N{REPLACEMENT CHARACTER}", "_")


def remove_old_data(target: Path) -> None:
    """Removes the data that we wrote for earlier models `target` and that no model in the folder names."""
    data = files_matching(target.parent, re.escape(_data_name(target)) + r"(\.\d+)?\.data")
    old = [path for path in data if _is_ours(path) and not _is_named(path)]
    if old:
        time.sleep(READING_S)
    for path in old:
        with suppress(OSError), abandoned(path) as free:
            if free and not _is_named(path):  # whoever wrote it has named it by now, or is gone
                path.unlink()


def _is_ours(path: Path) -> bool:
    with suppress(OSError), path.open("rb") as stream:
        return stream.read(len(OURS)) == OURS
    return False


def _is_named(data: Path) -> bool:
    """True if the name is in a model in the same folder, or in one that cannot be read."""
    return any(_holds(file, data.name.encode()) for file in files_matching(data.parent, "(?s:.*)"))


def _holds(file: Path, name: bytes) -> bool:
    """True if a file begins as a model does, and has a name in it."""
    try:
        with file.open("rb") as stream:
            if (start := stream.read(1)) == b"" or start not in MODEL_STARTS:
                return False
            with mmap(stream.fileno(), 0, access=ACCESS_READ) as content:
                return content.find(name) >= 0
    except FileNotFoundError:  # a temporary file that is gone
        return False
    except OSError:
        return True
