"""A manifest: a TOML file with models and the options of each.

preset = "trt-fp16"             # options of all its models

[[model]]
path = "detectors/*.onnx"       # a file, a folder or a pattern, relative to the manifest
inputs = "detectors/samples"
keep-fp32-op = ["Softmax"]
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rewriter.batch import found
from rewriter.batch.found import Found
from rewriter.errors import UsageError, did_you_mean
from rewriter.pipeline.config.option_values import from_toml
from rewriter.pipeline.declaration import Declaration, declarations
from rewriter.pipeline.options import BatchCommand, FixOptions

NOT_HERE = ("in_place", "dry_run", "save_plan")

KEYS: Mapping[str, Declaration] = {
    declared.key: declared
    for name, declared in declarations(BatchCommand).items()
    if name in declarations(FixOptions) and name not in NOT_HERE
}
"""What a manifest may set, as in rewriter.toml."""


def read(path: Path, output: Path) -> list[Found]:
    """The models of a manifest with their options.

    Raises:
        UsageError: it cannot be read, or sets what is no option; the message names the entry.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"it cannot be read: {error}", where=str(path), hint="name a TOML file") from error
    entries = table.pop("model", [])
    if not (isinstance(entries, list) and entries and all(isinstance(entry, dict) for entry in entries)):
        hint = 'write a table for each model: [[model]] and path = "net.onnx"'
        raise UsageError("it names no models", where=str(path), hint=hint)
    common = _options(table, str(path), path.parent)
    everything = []
    for number, entry in enumerate(entries, 1):
        everything.extend(_models(dict(entry), common, path, number, output))
    return everything


def _models(
    entry: dict[str, Any], common: Mapping[str, Any], manifest: Path, number: int, output: Path
) -> list[Found]:
    where, folder = f"{manifest}, model {number}", manifest.parent
    named = entry.pop("path", None)
    if not isinstance(named, str) or not named:
        raise UsageError("it has no path", where=where, hint='write path = "net.onnx"')
    options = {**common, **_options(entry, f"{where} ({named})", folder)}
    here = found.models([folder / named], output)
    return [replace(one, name=_name(one, folder), options=options) for one in here]


def _name(one: Found, folder: Path) -> str:
    """Relative to the manifest's folder, if it is below."""
    relative = Path(os.path.relpath(one.path, folder))
    return one.name if relative.parts[:1] in ((".",), ("..",)) else relative.as_posix()


def _options(table: Mapping[str, Any], where: str, folder: Path) -> dict[str, Any]:
    values = {}
    for word, value in table.items():
        if word not in KEYS:
            hint = did_you_mean(word, KEYS) or "docs/configuration.md lists the keys"
            raise UsageError(f"unknown key {word!r}", where=where, hint=hint)
        key = KEYS[word]
        try:
            values[key.name] = from_toml(key, value, folder)
            if key.check:
                key.check(values[key.name])
        except ValueError as error:
            raise UsageError(f"{word} cannot be {value!r}", where=where, hint=str(error)) from error
    return values
