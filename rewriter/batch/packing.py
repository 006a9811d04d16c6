"""Files of a model as bytes, for a machine that does not share our disk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from rewriter.model import data_files

Packed = Mapping[str, bytes]
"""Contents by path, relative to a folder, with `/`."""


def pack_model(model: Path) -> Packed:
    """The model with the files of its weights, relative to its folder."""
    try:
        weights = data_files(model)
    except Exception:  # the child process reports what is wrong with the model
        weights = []
    return _contents(model.parent, [model, *weights])


def pack(path: Path) -> Packed:
    """A file, or a folder with all below it, relative to its parent."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return _contents(path.parent, files)


def _contents(folder: Path, files: Iterable[Path]) -> Packed:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files if file.is_file()}


def unpack(packed: Packed, folder: Path) -> None:
    """Writes the files below a folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in packed.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
