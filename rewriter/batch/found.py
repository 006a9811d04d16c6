"""Finds the models of a batch: in folders, by patterns, and in a manifest."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rewriter.errors import UsageError

SUFFIX = ".onnx"
WILD = "*?["


@dataclass(frozen=True)
class Found:
    """A model with its name in the batch.

    Attributes:
        options: Its own, from a manifest.
    """

    name: str
    path: Path
    options: Mapping[str, Any] = field(default_factory=dict)


def models(paths: Iterable[Path], output: Path) -> list[Found]:
    """The models that paths name: files, folders with all below them, and patterns such as `nets/**/*.onnx`.

    The folder of the results is not searched.

    Raises:
        UsageError: a path or a pattern names no model.
    """
    found = []
    for path in paths:
        here = [one for one in _named(path) if not one.path.resolve().is_relative_to(output.resolve())]
        if not here:
            hint = f"name a file, a folder with {SUFFIX} files, or a pattern in quotes"
            raise UsageError("no model is there", where=str(path), hint=hint)
        found.extend(here)
    return found


def _named(path: Path) -> Iterator[Found]:
    if path.is_dir():
        for file in sorted(path.rglob(f"*{SUFFIX}")):
            if file.is_file():
                yield Found(file.relative_to(path).as_posix(), file)
    elif path.is_file():
        yield Found(path.name, path)
    elif any(sign in str(path) for sign in WILD):
        folder = _folder(path)
        for text in sorted(glob.glob(str(path), recursive=True)):  # noqa: PTH207  # an absolute pattern, too
            if Path(text).is_file():
                yield Found(Path(os.path.relpath(text, folder)).as_posix(), Path(text))


def _folder(pattern: Path) -> Path:
    """The part of a pattern before its first wildcard."""
    parts = pattern.parts
    wild = next(i for i, part in enumerate(parts) if any(sign in part for sign in WILD))
    return Path(*parts[:wild])


def merged(found: Iterable[Found]) -> list[Found]:
    """The models with each file once; a manifest's options go to the same file from a folder.

    Raises:
        UsageError: two files would have the same output.
    """
    by_file: dict[Path, Found] = {}
    for one in found:
        first = by_file.get(one.path.resolve(), one)
        by_file[one.path.resolve()] = Found(first.name, first.path, {**first.options, **one.options})
    names: dict[str, Path] = {}
    for one in by_file.values():
        other = names.setdefault(one.name, one.path)
        if other != one.path:
            hint = "name the folder that holds both, so that results keep their folders"
            raise UsageError(f"{other} has the same name: one result would replace the other",
                             where=str(one.path), hint=hint)  # fmt: skip
    return list(by_file.values())
