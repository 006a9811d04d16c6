"""Configuration: options from files and the environment, for the command line and for hooks.

    resolved = load().resolve(preset="accurate")
    rewriter.fix(model_path, output, **resolved.arguments("fix"))

The first of these sources that sets an option decides: the command line, the environment (`REWRITER_*`), the
file of the project one works in, the preset, and the default of `rewriter.fix`.
`rewriter.fix` and `rewriter.scan` themselves read neither files nor the environment.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rewriter.ir.errors import UsageError
from rewriter.pipeline import config_file
from rewriter.pipeline.config_file import ConfigFile
from rewriter.pipeline.options import JOBS, KEYS, Command
from rewriter.pipeline.presets import DEFAULT_OPSETS, preset_named
from rewriter.pipeline.reader import Text, read, unknown
from rewriter.pipeline.schema import PREFIX, declarations

CONFIG = f"{PREFIX}CONFIG"
"""Variable that names the configuration file, in place of the nearest one; with `none`, no file is read."""

OVERRIDES: Mapping[str, tuple[str, ...]] = {
    "preset": ("passes",),
    "plan": (
        *("keep_fp32", "keep_fp32_op", "lower", "lower_op", "plugin_types"),
        *("precision", "io", "tolerance", "max_latency_cost"),
    ),
    "tolerance": ("max_latency_cost",),
    "max_latency_cost": ("tolerance",),
    "input_shapes": ("inputs",),
}
"""Options that replace others: if one is set, the listed options of later sources are ignored."""

SIMILAR = 0.75
"""Similarity (`difflib`) above which an unknown variable is a misspelling, and not another program's."""


@dataclass(frozen=True)
class OptionSource:
    """One place that sets options, with their values by name."""

    kind: Literal["command line", "environment", "file"]
    title: str
    values: Mapping[str, Any]

    def where(self, name: str) -> str:
        """Returns the option as the user wrote it there."""
        key = KEYS[name]
        places = {"environment": key.variable, "file": f"{self.title}, key {key.key!r}"}
        return places.get(self.kind, f"`{key.key}`")


@dataclass(frozen=True)
class Origin:
    """The origin of a value.

    Attributes:
        text: For people: `environment (REWRITER_OPSET)`, `pyproject.toml [tool.rewriter]`, `preset accurate`.
        source: None for presets and defaults.
    """

    text: str
    source: OptionSource | None = None


@dataclass(frozen=True)
class ResolvedOptions:
    """Every option with its value and its origin, by name.

    Attributes:
        values: Includes values of the preset and defaults.
        origins: The origin of each value.
        ignored: A sentence for each value that another option overrides.
        one_run: Values of the command line for options that no file may set.
        file: The configuration file that was read, if there was one.
    """

    values: Mapping[str, Any]
    origins: Mapping[str, Origin]
    ignored: tuple[str, ...]
    one_run: dict[str, Any]
    file: Path | None = None

    def arguments(self, command: Command) -> dict[str, Any]:
        """Returns keyword arguments of `rewriter.fix`, `scan` or `verify`.

        For `fix` and `verify` these are the values that the user set; the preset and the function decide the
        rest. For `scan`, which has no presets, they are all values but a precision that it cannot scan for.
        """
        values = {name: self.values[name] for name in declarations(JOBS[command]) if name in KEYS}
        if command != "scan":
            return self.one_run | {n: value for n, value in values.items() if self.origins[n].source}
        return {n: v for n, v in values.items() if v is not None and (n, v) != ("precision", "fp32")}

    def where(self, name: str) -> str:
        """Returns the option as the user wrote it, or its key for presets and defaults."""
        source = self.origins[name].source
        return source.where(name) if source else f"`{KEYS[name].key}`"

    def messages(self) -> Iterator[str]:
        """Yields a sentence for each source but the command line, and for each ignored value."""
        by_source: dict[str, list[str]] = {}
        for name, origin in self.origins.items():
            if origin.source and origin.source.kind != "command line":
                by_source.setdefault(origin.source.title, []).append(KEYS[name].key)
        yield from (f"{title} sets {', '.join(keys)}" for title, keys in by_source.items())
        yield from self.ignored

    @contextmanager
    def errors_name_sources(self) -> Iterator[None]:
        """Makes errors about an option name the file or variable that set it."""
        try:
            yield
        except UsageError as error:
            key = re.match(r"`([a-z0-9-]+)`", error.where or "")
            name = key[1].replace("-", "_") if key else ""
            hint = error.hint
            for other in (other for other, names in OVERRIDES.items() if name in names):
                source = self.origins[other].source
                if source and source.kind != "command line":
                    hint = f"{hint} ({other} is set by {source.where(other)})"
            where = (
                self.where(name) + (error.where or "")[key.end() :]
                if key and name in self.origins
                else error.where
            )
            raise UsageError(error.what, where=where, hint=hint) from error


@dataclass(frozen=True)
class Configuration:
    """The options that the environment and a file set.

    Attributes:
        sources: The environment, and the file if there is one.
        file: The file that was read.
        warnings: Sentences for the user.
    """

    sources: tuple[OptionSource, ...]
    file: Path | None = None
    warnings: tuple[str, ...] = ()

    def resolve(self, **own: Any) -> ResolvedOptions:
        """Returns every option with its value and its origin; `own` are those of the command line."""
        given = {n: v for n, v in own.items() if n in KEYS and v not in (None, [], ())}
        sources = (OptionSource("command line", "command line", given), *self.sources)
        found = {name: next((s for s in sources if name in s.values), None) for name in KEYS}
        ignored = tuple(_override(sources, found))
        values = {name: source.values[name] for name, source in found.items() if source}
        preset = preset_named(values.get("preset", KEYS["preset"].default))
        origins = {}
        for name, key in KEYS.items():
            if source := found[name]:
                in_variable = source.kind == "environment"
                origins[name] = Origin(
                    f"environment ({key.variable})" if in_variable else source.title, source
                )
            else:
                values[name] = key.default if key.default is not None else preset.choose(name)
                origins[name] = Origin(f"preset {preset.name}" if name in preset.defaults else "default")
        if values["opset"] is None:
            values["opset"] = DEFAULT_OPSETS[values["precision"]]
        one_run = {n: v for n, v in own.items() if n not in KEYS}
        return ResolvedOptions(values, origins, ignored, one_run, self.file)


def load(folder: Path | None = None, environment: Mapping[str, str] | None = None) -> Configuration:
    """Reads the environment and the configuration file of the project that one works in.

    Where a model lies does not matter: what comes with a model must not decide what is done with it.

    Args:
        folder: The folder that one works in; None: the current one.
        environment: In place of `os.environ`.

    Raises:
        UsageError: an unknown key, a value of the wrong type or without sense, or a key that loads code or
            writes files in a file of another user; the message names the file or the variable.
    """
    variables = os.environ if environment is None else environment
    named = variables.get(CONFIG, "")
    file = _file(Path.cwd() if folder is None else folder, named)
    sources = [OptionSource("environment", "the environment", dict(_from_environment(variables)))]
    if file and file.read:
        sources.append(OptionSource("file", file.title, dict(_from_file(file, named=bool(named)))))
    warnings = (*(file.notes if file else ()), *_misspelt(variables))
    return Configuration(tuple(sources), file.path if file and file.read else None, warnings)


def _file(folder: Path, named: str) -> ConfigFile | None:
    if named == "none":
        return None
    if named and not Path(named).is_file():
        raise UsageError(f"there is no file {named}", where=CONFIG, hint="name a file, or none")
    return config_file.read(Path(named).absolute()) if named else config_file.find(folder)


def _from_environment(variables: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    for name, key in KEYS.items():
        text = variables.get(key.variable, "").strip()
        if text:  # an empty variable sets nothing, as in most shells and CI files
            yield name, read(key, Text(text), key.variable)


def _from_file(file: ConfigFile, *, named: bool) -> Iterator[tuple[str, Any]]:
    keys = {key.key: key for key in KEYS.values()}
    for word, value in file.table.items():
        if word not in keys:
            raise unknown(word, f"unknown key {word!r}", file.title, keys)
        if not named:
            config_file.require_own(word, value, file)
        yield keys[word].name, read(keys[word], value, f"{file.title}, key {word!r}", folder=file.path.parent)


def _misspelt(variables: Mapping[str, str]) -> Iterator[str]:
    known = {key.variable for key in KEYS.values()} | {CONFIG}
    for name in sorted(variables):
        if name.startswith(PREFIX) and name not in known:
            ends = [other.removeprefix(PREFIX) for other in known]
            close = difflib.get_close_matches(name.removeprefix(PREFIX), ends, n=1, cutoff=SIMILAR)
            if close:
                yield f"the variable {name} is unknown and not used: did you mean {PREFIX}{close[0]}?"


def _override(sources: tuple[OptionSource, ...], found: dict[str, OptionSource | None]) -> Iterator[str]:
    """Removes overridden options from `found`, and yields a sentence for each."""
    for name, others in OVERRIDES.items():
        over = found[name]
        for other in others if over else ():
            under = found[other]
            if over and under and sources.index(over) < sources.index(under):
                found[other] = None
                yield f"{under.where(other)} is not used: {over.where(name)} takes its place"
