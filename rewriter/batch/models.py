"""The models of a batch with their options, from files, folders, patterns and a manifest (docs/batch.md).

Beside each result is a file with its outcome, which lets the next run skip the model.
"""

import glob
import hashlib
import json
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rewriter.base.errors import UsageError
from rewriter.hooks.fixing import data_beside
from rewriter.ir.model import data_files, write_json
from rewriter.ir.model.external_data import remove_old_data
from rewriter.ir.reading import read_json, read_toml
from rewriter.jobs.fix.links import io_of_files, type_of_links
from rewriter.jobs.fix.selection import LatencyShare
from rewriter.pipeline.config import Configuration
from rewriter.pipeline.options import BatchCommand, FixOptions
from rewriter.pipeline.schema import Option, declarations, read_table
from rewriter.report.deploy import files_beside
from rewriter.report.json import installed_versions
from rewriter.runtime.recording.record import RECORD, Recording

KEYS: Mapping[str, Option] = {
    declared.key: declared
    for name, declared in declarations(BatchCommand).items()
    if name in declarations(FixOptions) and name not in ("in_place", "dry_run", "save_plan")
}
"""Options that a manifest may set, as in rewriter.toml."""


@dataclass(frozen=True)
class Entry:
    """One model to fix."""

    name: str  # its path relative to the folder that was named, with `/`; it is unique in a batch
    model: Path
    output: Path
    options: Mapping[str, Any] = field(default_factory=dict)  # of `rewriter.fix`, as the user set them


def entries(
    paths: Sequence[Path],
    output: Path,
    options: Mapping[str, Any],
    configuration: Configuration,
    manifest: Path | None = None,
) -> list[Entry]:
    """Every model with its output and the options in force for it.

    The command line decides over the manifest, and the manifest over the environment and the project's file.

    Raises:
        UsageError: there is no model, two have one output, `output` is a file, or an option makes no sense.
    """
    if output.exists() and not output.is_dir():
        raise UsageError("it is a file", option="output", where=output, hint="name a folder for the results")
    models = [*named(paths, output), *(listed(manifest, output) if manifest else [])]
    if not models:
        hint = "name files or folders, or `manifest=FILE.toml`"
        raise UsageError("no models are named", where="rewriter batch", hint=hint)
    resolved = [_resolved(entry, options, configuration) for entry in _merged(models)]
    return _linked(resolved, [Recording.read(path) for path in paths if (path / RECORD).is_file()])


def _linked(entries: list[Entry], recordings: Iterable[Recording]) -> list[Entry]:
    """The entries of recordings with one type for both sides of each link, where `io` asks for it."""
    for recording in recordings:
        names = {f"{file.name}.onnx": file.name for file in recording.files}
        files = {names[e.name]: (e.model, FixOptions(**e.options)) for e in entries if e.name in names}
        if any(type_of_links(options.io) for _, options in files.values()):
            steps = {(file, output): s for file in files for output, s in recording.steps(file).items()}
            io = io_of_files(files, recording.links, steps)
            entries = [
                replace(e, options={**e.options, "io": io[names[e.name]]}) if e.name in names else e
                for e in entries
            ]
    return entries


def _resolved(entry: Entry, options: Mapping[str, Any], configuration: Configuration) -> Entry:
    """The entry with all options in force, and the samples beside its model."""
    if entry.output.resolve() == entry.model.resolve():
        where, hint = str(entry.output), "name another folder"
        raise UsageError("the result would replace the model", where=where, hint=hint)
    resolved = configuration.resolve(**{**entry.options, **options})
    with resolved.errors_name_sources():
        arguments = resolved.arguments("fix")
        FixOptions(**arguments)
    if "plan" not in arguments:
        arguments |= data_beside(entry.model, arguments)
    return replace(entry, options=arguments)


def named(paths: Iterable[Path], output: Path) -> list[Entry]:
    """The models that paths name: files, recordings, folders with all below them, and patterns (`**/*.onnx`).

    The folder of the results is not searched, nor are hidden folders. A path without a model is a UsageError.
    """
    entries = []
    for path in paths:
        if (path / RECORD).is_file():
            entries += recorded(path, output)
            continue
        here = [pair for pair in _files(path) if not pair[1].resolve().is_relative_to(output.resolve())]
        if not here:
            inside = path.resolve().is_relative_to(output.resolve())
            what = "results go there, so it is not searched" if inside else "no model is there"
            hint = "name a file, a folder with .onnx files, or a pattern in quotes"
            raise UsageError(what, where=path, hint="name another folder with -o" if inside else hint)
        entries += [Entry(name, file, output / name) for name, file in here]
    return entries


def recorded(folder: Path, output: Path) -> list[Entry]:
    recording = Recording.read(folder)
    return [
        Entry(f"{f.name}.onnx", folder / f.model, output / f"{f.name}.onnx", {"inputs": folder / f.samples})
        for f in recording.files
    ]


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    """Each model with its name."""
    if path.is_dir():
        for file in sorted(path.rglob("*.onnx")):
            name = file.relative_to(path)
            if file.is_file() and not any(part.startswith(".") for part in name.parts):
                yield name.as_posix(), file
    elif path.is_file():
        yield path.name, path
    elif glob.has_magic(str(path)):
        first = next(i for i, part in enumerate(path.parts) if glob.has_magic(part))
        folder = Path(*path.parts[:first])
        for text in sorted(glob.glob(str(path), recursive=True)):  # noqa: PTH207  # an absolute pattern, too
            if Path(text).is_file():
                yield Path(os.path.relpath(text, folder)).as_posix(), Path(text)


def _merged(models: Iterable[Entry]) -> list[Entry]:
    """The models without duplicate files, of which the manifest's wins; UsageError: two share an output."""
    by_file = {entry.model.resolve(): entry for entry in models}
    names: dict[str, Path] = {}
    for entry in by_file.values():
        other = names.setdefault(entry.name, entry.model)
        if other != entry.model:
            what = f"{other} has the same name: one result would replace the other"
            hint = "name the folder that holds both, so that results keep their folders"
            raise UsageError(what, where=entry.model, hint=hint)
    return list(by_file.values())


def listed(manifest: Path, output: Path) -> list[Entry]:
    """The models of a manifest with their options; a UsageError names the entry."""
    table = read_toml(manifest, "name a TOML file")
    tables = table.pop("model", [])
    if not (isinstance(tables, list) and tables and all(isinstance(table, dict) for table in tables)):
        hint = 'write a table for each model: [[model]] and path = "net.onnx"'
        raise UsageError("it names no models", where=manifest, hint=hint)
    folder, models = manifest.parent, list[Entry]()
    common = read_table(KEYS, table, str(manifest), folder)
    for number, table in enumerate(tables, 1):
        path, where = table.pop("path", None), f"{manifest}, model {number}"
        if not isinstance(path, str) or not path:
            raise UsageError("it has no path", where=where, hint='write path = "net.onnx"')
        options = {**common, **read_table(KEYS, table, f"{where} ({path})", folder)}
        for entry in named([folder / path], output):
            relative = Path(os.path.relpath(entry.model, folder))
            name = entry.name if relative.parts[:1] == ("..",) else relative.as_posix()
            models.append(Entry(name, entry.model, output / name, options))
    return models


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
