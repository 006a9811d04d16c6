"""Reads the photographs that two pipelines started from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from rewriter.data.inputs.arranging import as_array, is_array
from rewriter.data.inputs.images import pillow
from rewriter.errors import InputsError
from rewriter.model import Array

ARRAYS = (".npy",)
"""Files that hold pixels as an array; any other file is read by Pillow."""


def are_photographs(source: Any) -> bool:
    """True for the types that `photographs` takes."""
    if isinstance(source, (list, tuple)):
        return all(_is_path(one) or _is_picture(one) for one in source)
    return _is_path(source) or _is_picture(source)


def photographs(source: Any) -> list[Array]:
    """The photographs as [H, W, 3] in uint8, RGB.

    Args:
        source: A file, a folder (in the order of names), an array, a picture of Pillow, or a list of these.

    Raises:
        InputsError: a file cannot be read, or is no photograph; Pillow is not installed.
    """
    if isinstance(source, (list, tuple)):
        return [pixels for one in source for pixels in photographs(one)]
    if not _is_path(source):
        return [_checked(np.asarray(as_array(source)), "--images")]
    path = Path(source)
    if not path.exists():
        raise InputsError("no such file or folder", where=str(path), hint="name the photographs, in order")
    files = sorted(one for one in path.iterdir() if one.is_file()) if path.is_dir() else [path]
    return [_read(file) for file in files]


def _is_path(source: Any) -> bool:
    return isinstance(source, (str, os.PathLike))


def _is_picture(source: Any) -> bool:
    return is_array(source) or hasattr(source, "__array_interface__")


def _read(file: Path) -> Array:
    return _checked(_array(file) if file.suffix.lower() in ARRAYS else _decoded(file), str(file))


def _checked(pixels: Array, where: str) -> Array:
    if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8:
        found = f"{pixels.dtype} {list(pixels.shape)}"
        raise InputsError(f"it holds {found}, not uint8 [H, W, 3]", where=where, hint="save it as RGB")
    return pixels


def _array(file: Path) -> Array:
    try:
        return np.asarray(np.load(file, allow_pickle=False))
    except (OSError, ValueError) as error:
        raise InputsError(f"cannot read it: {error}", where=str(file), hint="save it with np.save") from error


def _decoded(file: Path) -> Array:
    library = pillow(file)
    try:
        with library.open(file) as image:
            return np.asarray(image.convert("RGB"))
    except OSError as error:
        raise InputsError(f"cannot read it: {error}", where=str(file), hint="is it an image?") from error
