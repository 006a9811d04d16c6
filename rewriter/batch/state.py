"""What became of a model, and the file beside its result that lets the next run skip it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rewriter.batch.models import Entry
from rewriter.ir.model import data_files, write_json
from rewriter.report.json import installed_versions

Ending = Literal[
    "verified", "unproven", "unchecked", "failed", "unbuildable", "refused", "crashed", "timed out"
]
"""`unproven`: on random data, or all of it is FP32. `unchecked`: no check was asked for."""

PASSED: tuple[Ending, ...] = ("verified", "unproven", "unchecked")
FINISHED: tuple[Ending, ...] = (*PASSED, "failed", "unbuildable")
"""Endings that another run would repeat; the others may have had causes outside the model."""

STATE_VERSION = 2
"""Of the state file; one of another version is not read, and its model is run again."""


@dataclass(frozen=True)
class Outcome:
    """What a child process reported, or what its end says.

    Attributes:
        text: One sentence for people.
        fp32_nodes: Nodes that stay in FP32; `float_nodes`: all that could be in FP16; None without a plan.
        all_fp32: True if a repair left all of it in FP32.
        error: Relative L2 error of the worst output in the check that decides.
        seconds: Wall time of the process.
        peak_bytes: Its largest resident memory; 0 where the system does not report it.
        files: Names of the files that it made, relative to its folder.
    """

    ending: Ending
    text: str
    fp32_nodes: int | None = None
    float_nodes: int | None = None
    all_fp32: bool = False
    error: float | None = None
    seconds: float = 0.0
    peak_bytes: int = 0
    files: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """True if every check that was asked for passed."""
        return self.ending in PASSED


@dataclass(frozen=True)
class Record:
    """The outcome of a model in this run or in an earlier one, which `skipped` says."""

    entry: Entry
    outcome: Outcome
    skipped: bool = False


def state_file(output: Path) -> Path:
    """The state file of a result: `net.onnx.batch.json` beside `net.onnx`."""
    return output.with_name(f"{output.name}.batch.json")


def save(record: Record, key: str) -> None:
    """Write the state of a finished model; the file is replaced as a whole.

    Raises:
        OutputError: it cannot be written.
    """
    content = {
        "state_version": STATE_VERSION,
        "key": key,
        "files": {name: digest(record.entry.output.parent / name) for name in record.outcome.files},
        "outcome": asdict(record.outcome),
    }
    write_json(content, state_file(record.entry.output), "the state")


def finished(entry: Entry, key: str) -> Record | None:
    """The record of an earlier run with this key, if its files are unchanged; None otherwise."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        state = json.loads(state_file(entry.output).read_text(encoding="utf-8"))
        current = {name: digest(entry.output.parent / name) for name in state["files"]}
        if (state["state_version"], state["key"], state["files"]) == (STATE_VERSION, key, current):
            outcome = Outcome(**{**state["outcome"], "files": tuple(state["outcome"]["files"])})
            return Record(entry, outcome, skipped=True)
    return None


# -- the key of a model's work: equal keys give equal results -----------------------------------


def key_of(entry: Entry) -> str:
    """Hash of the model with its weights, of the files and values of its options, and of all versions.

    Names of files do not count, their content does.
    """
    files = option_files(entry.options)
    parts = {
        "model": [digest(file) for file in model_files(entry.model)],
        "files": {name: [digest(path) for path in named] for name, named in files.items()},
        "options": {name: repr(value) for name, value in entry.options.items() if name not in files},
        "versions": installed_versions(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def model_files(model: Path) -> list[Path]:
    """The model and the files with its weights; if it cannot be read, which its child reports, itself."""
    try:
        return [model, *data_files(model)]
    except Exception:
        return [model]


def option_files(options: Mapping[str, Any]) -> dict[str, list[Path]]:
    """The files and folders that options name, by option."""
    lists = {name: value if isinstance(value, (list, tuple)) else [value] for name, value in options.items()}
    paths = {name: [Path(p) for p in parts if isinstance(p, os.PathLike)] for name, parts in lists.items()}
    return {name: named for name, named in paths.items() if named}


def digest(path: Path) -> str:
    """SHA-256 of a file, or of the names and contents in a folder; "" if nothing is there."""
    if path.is_file():
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    files = [file for file in sorted(path.rglob("*")) if file.is_file()]
    names = [f"{file.relative_to(path).as_posix()} {digest(file)}" for file in files]
    return hashlib.sha256("\n".join(names).encode()).hexdigest() if names else ""
