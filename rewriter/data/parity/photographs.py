"""Reads the photographs that two pipelines started from."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rewriter.data.inputs.images import pillow
from rewriter.errors import InputsError
from rewriter.model import Array

ARRAYS = (".npy",)
"""Files that hold pixels as an array; any other file is read by Pillow."""


def photographs(path: Path) -> list[Array]:
    """The photographs of a file or a folder, in the order of their names: [H, W, 3] in uint8, RGB.

    Raises:
        InputsError: a file cannot be read, or is no photograph; Pillow is not installed.
    """
    if not path.exists():
        raise InputsError("no such file or folder", where=str(path), hint="name the photographs, in order")
    files = sorted(one for one in path.iterdir() if one.is_file()) if path.is_dir() else [path]
    return [_read(file) for file in files]


def _read(file: Path) -> Array:
    pixels = _array(file) if file.suffix.lower() in ARRAYS else _decoded(file)
    if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8:
        found = f"{pixels.dtype} {list(pixels.shape)}"
        raise InputsError(f"it holds {found}, not uint8 [H, W, 3]", where=str(file), hint="save it as RGB")
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
