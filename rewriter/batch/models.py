"""The models of a batch with their options: from files, folders, patterns, and a manifest (docs/batch.md)."""

import glob
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rewriter.base.errors import UsageError
from rewriter.hooks.precommit import data_beside
from rewriter.ir.reading import read_toml
from rewriter.jobs.fix.links import io_of_files, type_of_links
from rewriter.pipeline.config import Configuration
from rewriter.pipeline.options import BatchCommand, FixOptions
from rewriter.pipeline.schema import Option, declarations, read_table
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
        UsageError: there is no model, two have one output, or an option makes no sense.
    """
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
    if not {"inputs", "input_shapes", "plan"} & arguments.keys():
        arguments |= data_beside(entry.model)
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
            raise UsageError(what, where=str(path), hint="name another folder with -o" if inside else hint)
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
            raise UsageError(what, where=str(entry.model), hint=hint)
    return list(by_file.values())


def listed(manifest: Path, output: Path) -> list[Entry]:
    """The models of a manifest with their options; a UsageError names the entry."""
    table = read_toml(manifest, "name a TOML file")
    tables = table.pop("model", [])
    if not (isinstance(tables, list) and tables and all(isinstance(table, dict) for table in tables)):
        hint = 'write a table for each model: [[model]] and path = "net.onnx"'
        raise UsageError("it names no models", where=str(manifest), hint=hint)
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
