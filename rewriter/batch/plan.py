"""What a batch does, from what the user gave: every model with its options, and the limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rewriter.batch import found, manifest
from rewriter.batch.entry import Entry
from rewriter.errors import UsageError
from rewriter.pipeline.config import Configuration
from rewriter.pipeline.declaration import declarations
from rewriter.pipeline.options import FixOptions


def entries(
    paths: Sequence[Path],
    output: Path,
    given: Mapping[str, Any],
    configuration: Configuration,
    manifest_file: Path | None = None,
) -> list[Entry]:
    """Every model with its output and the options in force for it.

    The command line decides over the manifest, and the manifest over the environment and the project's file.

    Args:
        given: Options of `fix` on the command line.

    Raises:
        UsageError: there is no model, two have one output, or an option makes no sense.
    """
    _check(given)
    listed = manifest.read(manifest_file, output) if manifest_file else []
    models = found.merged([*found.models(paths, output), *listed])
    if not models:
        hint = "name files or folders, or --manifest FILE.toml"
        raise UsageError("no models are named", where="rewriter batch", hint=hint)
    return [_entry(one, output, given, configuration) for one in models]


def _entry(one: found.Found, output: Path, given: Mapping[str, Any], configuration: Configuration) -> Entry:
    target = output / one.name
    if target.resolve() == one.path.resolve():
        raise UsageError("the result would replace the model", where=str(target), hint="name another folder")
    resolved = configuration.resolve(**{**one.options, **given})
    with resolved.errors_name_sources():
        options = resolved.arguments("fix")
        FixOptions(**options)
    beside = one.path.with_suffix(".npz")
    if beside.is_file() and not {"inputs", "input_shapes", "plan"} & options.keys():
        options["inputs"] = beside
    return Entry(one.name, one.path, target, options)


def _check(given: Mapping[str, Any]) -> None:
    """Refuses what each child process would refuse."""
    for name, value in given.items():
        option = declarations(FixOptions)[name]
        try:
            if option.check:
                option.check(value)
        except ValueError as error:
            raise UsageError(f"it cannot be {value!r}", where=option.flag, hint=str(error)) from error


def of_fix(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `fix` among those of the command line."""
    return {name: value for name, value in given.items() if name in declarations(FixOptions)}
