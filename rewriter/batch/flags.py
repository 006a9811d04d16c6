"""Options as arguments of the command line, for a child process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rewriter.pipeline.declaration import Declaration, Names, Paths, Shapes, declarations


def arguments(kind: type, options: Mapping[str, Any]) -> list[str]:
    """The arguments that set these options of a command, each as one text `--name=value`.

    Args:
        kind: The class that declares them.
        options: Values by name; None sets nothing.
    """
    declared = declarations(kind)
    return [
        text
        for name, value in options.items()
        if value is not None and name in declared
        for text in _texts(declared[name], value)
    ]


def _texts(option: Declaration, value: Any) -> Iterator[str]:
    if option.kind is bool:
        yield from _switch(option, value=value)
    elif option.kind == Shapes:
        for name, dims in value.items():
            yield f"{option.flag}={name}:{'x'.join(map(str, dims))}"
    elif option.kind in (Names, Paths):
        yield from (f"{option.flag}={part}" for part in value)
    else:
        yield f"{option.flag}={value}"


def _switch(option: Declaration, *, value: bool) -> Iterator[str]:
    on, _, off = (option.flags or (option.flag,))[0].partition("/")
    if value:
        yield on
    elif off:
        yield off


def variables(kind: type, options: Mapping[str, Any]) -> dict[str, str]:
    """Environment variables for what the command line cannot say: that a switch is off."""
    declared = declarations(kind)
    return {
        declared[name].variable: "false"
        for name, value in options.items()
        if value is False and name in declared and not any("/" in flag for flag in declared[name].flags)
    }


def paths(options: Mapping[str, Any]) -> dict[str, list[Path]]:
    """The files and folders that options name, by option."""
    found: dict[str, list[Path]] = {}
    for name, value in options.items():
        values = value if isinstance(value, (list, tuple)) else [value]
        named = [Path(part) for part in values if isinstance(part, os.PathLike)]
        if named:
            found[name] = named
    return found
