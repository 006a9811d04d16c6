"""The outcome of a model, and the file beside its result that lets the next run skip it."""

import hashlib
import json
import os
from collections.abc import Generator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rewriter.base.errors import UsageError
from rewriter.batch.models import Entry
from rewriter.ir.model import data_files, write_json
from rewriter.ir.model.external_data import remove_old_data
from rewriter.ir.reading import read_json
from rewriter.jobs.fix.selection import LatencyShare
from rewriter.report.deploy import files_beside
from rewriter.report.json import installed_versions

Ending = Literal[
    "verified", "unproven", "unchecked", "failed", "unbuildable", "refused", "crashed", "timed out"
]
"""`unproven`: checked, with a gap such as random data, or all FP32. `unchecked`: checks were turned off."""

PASSED: tuple[Ending, ...] = ("verified", "unproven", "unchecked")
FINISHED: tuple[Ending, ...] = (*PASSED, "failed", "unbuildable")
"""Endings that another run would repeat; the others may have had causes outside the model."""


@dataclass(frozen=True)
class Outcome:
    """The result that a child process reported, or that follows from the way it ended."""

    ending: Ending
    text: str
    fp32_nodes: int | None = None  # those that stay in FP32; None without a plan
    float_nodes: int | None = None  # all that could be in FP16
    error: float | None = None  # relative L2 error of the worst output in the check that decides
    seconds: float = 0.0
    files: tuple[str, ...] = ()  # names of the files that it made, in the folder of the output
    skipped: bool = False  # an earlier run found it
    latency_shares: tuple[LatencyShare, ...] = ()

    @property
    def passed(self) -> bool:
        """True if every requested check passed."""
        return self.ending in PASSED


@dataclass(frozen=True)
class State:
    """The contents of a state file: the key of the run, digests of the files it wrote, and its outcome."""

    key: str
    files: Mapping[str, str]
    outcome: Outcome


Ends = Generator[tuple[Entry, Outcome], None, None]  # models with their outcomes, as they end


def state_file(output: Path) -> Path:
    """The state file of a result: `net.onnx.batch.json` beside `net.onnx`."""
    return output.with_name(f"{output.name}.batch.json")


def page_of(output: Path) -> Path:
    """The page of a result: `net.onnx.html` beside `net.onnx`."""
    return output.with_name(f"{output.name}.html")


def save(entry: Entry, outcome: Outcome, key: str) -> None:
    """Write the state of a finished model; the file is replaced as a whole."""
    files = {name: digest(entry.output.parent / name) for name in outcome.files}
    write_json(asdict(State(key, files, outcome)), state_file(entry.output), "the state")


def finished(entry: Entry, key: str) -> Outcome | None:
    """The outcome of an earlier run with this key, if its files are unchanged; None otherwise."""
    with suppress(OSError, UsageError):
        state: State = read_json(state_file(entry.output), State, "the model is fixed again")
        current = {name: digest(entry.output.parent / name) for name in state.files}
        if (state.key, state.files) == (key, current) and "" not in current.values():
            return replace(state.outcome, files=tuple(current), skipped=True)
    return None


def key_of(entry: Entry) -> str:
    """Hash of the model with its weights, of the files and values of its options, and of all versions.

    Equal keys give equal results. Names of files do not count, their content does.
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


GIB = 2**30

BASE_BYTES = 0.5 * GIB
"""Memory that does not grow with the weights. Measured on a model of 16 KB: 0.30 GiB; the rest is for samples
and activations, which the size of a file does not show."""

BYTES_PER_BYTE = {"inside": 5, "external": 2}
"""Memory of `fix` for each byte of a model's file, and of its external data, which is mapped, not read.
Measured with all its processes (PSS) on chains of MatMuls, TensorRT-RTX's build included: 4.5 for 0.06 and
0.19 GiB inside, 1.7 and 1.5 for 0.19 and 0.50 GiB of external data."""


def memory_needed(model: Path) -> int:
    """Estimated bytes that `fix` needs for a model."""
    inside, *external = (file.stat().st_size if file.is_file() else 0 for file in model_files(model))
    return int(BASE_BYTES + BYTES_PER_BYTE["inside"] * inside + BYTES_PER_BYTE["external"] * sum(external))


def set_aside(entry: Entry) -> str:
    """Renames the result of an earlier model to `net.onnx.outdated`; returns words that say so, or ""."""
    left, *_ = map(_outdated, _named_files(entry))
    with suppress(OSError):
        for file in filter(Path.is_file, _named_files(entry)):
            file.replace(_outdated(file))
        remove_old_data(entry.output)  # weights of a model that was set aside before
    if entry.output.is_file():
        return f"; {entry.output.name} is the result of an earlier model, and cannot be renamed"
    return f"; {left.name} is the result of an earlier model" if left.is_file() else ""


def remove_outdated(entry: Entry) -> None:
    """Removes the files that were set aside, since there is a new result."""
    with suppress(OSError):
        for file in filter(Path.is_file, map(_outdated, _named_files(entry))):
            file.unlink()
            remove_old_data(entry.output)


def _named_files(entry: Entry) -> tuple[Path, ...]:
    """The files of a result that are known by their names; its model names its data."""
    return entry.output, *files_beside(entry.output)


def _outdated(file: Path) -> Path:
    return file.with_name(f"{file.name}.outdated")
