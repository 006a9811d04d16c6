"""Writes models, reports and plans to files: the whole file, or nothing."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import external_data_helper

from rewriter.errors import ModelError, OutputError
from rewriter.model.model import PROTOBUF_LIMIT, Model
from rewriter.model.reading import read_proto
from rewriter.model.tensors import Array


def save(model: Model, path: str | os.PathLike[str]) -> Path:
    """Writes the model to `path`; a failure leaves the old file there.

    Weights go into `<name>.data` beside it when the model does not fit into one protobuf message or
    came from a file with external data. A data file of another model is not overwritten.

    Raises:
        OutputError: the folder does not exist or cannot be written, or the disk is full.
    """
    target = Path(path)
    with _reporting_failure("the model", target):
        if model.external or model.size > PROTOBUF_LIMIT:
            _save_external(model, target)
        else:
            with replacing(target) as temporary:
                temporary.write_bytes(model.whole().SerializeToString(deterministic=True))
    return target


def write_text(text: str, path: Path, what: str = "the report", newline: str | None = None) -> None:
    """Write a text file; `path` is replaced only after everything is written.

    Args:
        what: Name of the content in the error message.
        newline: Line ending, as for `open`.

    Raises:
        OutputError: the folder does not exist or cannot be written, or the disk is full.
    """
    with _reporting_failure(what, path), replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline=newline)


def write_json(content: Any, path: Path, what: str = "the report") -> None:
    """Write standard JSON (no NaN or infinity), in the same way as `write_text`."""
    write_text(json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False) + "\n", path, what)


@contextmanager
def _reporting_failure(what: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"cannot write {what}: {error.strerror or error}",
            where=str(path),
            hint="check the folder, its permissions and the free space",
        ) from error


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yields a temporary file beside `target`, which replaces it if the block succeeds."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # mkstemp makes private files
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _save_external(model: Model, target: Path) -> None:
    data = _data_file(target)
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    with replacing(data) as data_file, replacing(target) as model_file:
        with data_file.open("wb") as stream:
            for tensor in proto.graph.initializer:
                if tensor.name in model.weights:
                    _append(stream, tensor, model.weights[tensor.name], data.name)
        model_file.write_bytes(proto.SerializeToString(deterministic=True))


def _append(stream: Any, tensor: onnx.TensorProto, array: Array, location: str) -> None:
    stream.write(b"\0" * (-stream.tell() % 4096))  # page-aligned, so that readers can map it
    offset = stream.tell()
    stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    del tensor.external_data[:]
    for key, value in (("location", location), ("offset", offset), ("length", array.nbytes)):
        tensor.external_data.add(key=key, value=str(value))


def _data_file(target: Path) -> Path:
    """`<target>.data`, or the first numbered one that no other model owns."""
    owned = _locations(target)
    numbers = ("", *(f".{i}" for i in range(1, 1000)))
    candidates = (target.with_name(f"{target.name}{number}.data") for number in numbers)
    return next(c for c in candidates if not c.exists() or c.name in owned)


def _locations(path: Path) -> set[str]:
    if not path.is_file():
        return set()
    try:
        proto = read_proto(path)
    except ModelError:
        return set()
    external = (t for t in proto.graph.initializer if t.external_data)
    return {external_data_helper.ExternalDataInfo(t).location for t in external}
