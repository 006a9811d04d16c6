"""The key of a model's work: equal keys give equal results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from rewriter.batch.entry import Entry
from rewriter.batch.flags import paths
from rewriter.model import data_files
from rewriter.report.json import installed_versions


def key_of(entry: Entry) -> str:
    """Hash of the model with its weights, of the files and values of its options, and of all versions.

    Names of files do not count, their content does.
    """
    files = paths(entry.options)
    values = {name: value for name, value in entry.options.items() if name not in files}
    parts = {
        "model": [digest(file) for file in (entry.model, *_weights(entry.model))],
        "files": {name: [digest(path) for path in named] for name, named in files.items()},
        "options": {name: repr(value) for name, value in values.items()},
        "versions": installed_versions(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _weights(model: Path) -> list[Path]:
    """Files with its weights, unless the model cannot be read: its child process reports that."""
    try:
        return data_files(model)
    except Exception:
        return []


def digest(path: Path) -> str:
    """SHA-256 of a file, or of the names and contents in a folder; "" if nothing is there."""
    if path.is_file():
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    names = [f"{name} {digest(path / name)}" for name in _below(path)]
    return hashlib.sha256("\n".join(names).encode()).hexdigest() if names else ""


def _below(folder: Path) -> Iterator[str]:
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            yield file.relative_to(folder).as_posix()
