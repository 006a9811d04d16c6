"""Resolves every option to one value from the sources in their order, and records its origin."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rewriter.errors import UsageError
from rewriter.pipeline.config import config_file
from rewriter.pipeline.config.option_values import from_text, from_toml, to_text
from rewriter.pipeline.config.trust import require_own
from rewriter.pipeline.declaration import PREFIX, Declaration, declarations
from rewriter.pipeline.options import JOBS, KEYS, Command
from rewriter.pipeline.pass_options import nearest
from rewriter.pipeline.presets import DEFAULT_OPSETS, preset_named

CONFIG = f"{PREFIX}CONFIG"
"""Variable that names the configuration file, in place of the nearest one; with `none`, no file is read."""

OVERRIDES: Mapping[str, tuple[str, ...]] = {
    "preset": ("passes",),
    "plan": ("keep_fp32", "keep_fp32_op", "precision", "io", "tolerance", "max_latency_cost"),
    "tolerance": ("max_latency_cost",),
    "max_latency_cost": ("tolerance",),
    "input_shapes": ("inputs",),
}
"""Options that replace others: if one is set, the listed options of later sources are ignored."""

SIMILAR = 0.75
"""Similarity (`difflib`) above which an unknown variable is a misspelling, and not another program's."""

SourceKind = Literal["command line", "environment", "file"]


@dataclass(frozen=True)
class OptionSource:
    """One place that sets options, with their values by name."""

    kind: SourceKind
    title: str
    values: Mapping[str, Any]

    def where(self, name: str) -> str:
        """Returns the option as the user wrote it there."""
        key = KEYS[name]
        places = {"environment": key.variable, "file": f"{self.title}, key {key.key!r}"}
        return places.get(self.kind, f"--{key.key}")

    def origin(self, name: str) -> Origin:
        return Origin(
            f"environment ({KEYS[name].variable})" if self.kind == "environment" else self.title, self
        )


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
        """Returns the option as the user wrote it, or as on the command line for presets and defaults."""
        source = self.origins[name].source
        return source.where(name) if source else f"--{KEYS[name].key}"

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
            name = (error.where or "").removeprefix("--").replace("-", "_")
            hint = error.hint
            for other in (other for other, names in OVERRIDES.items() if name in names):
                source = self.origins[other].source
                if source and source.kind != "command line":
                    hint = f"{hint} ({other} is set by {source.where(other)})"
            where = self.where(name) if name in self.origins else error.where
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

    def resolve(self, **given: Any) -> ResolvedOptions:
        """Resolves all options; `given` holds those of the command line, where None and empty set nothing."""
        own = {name: value for name, value in given.items() if value not in (None, [], (), {})}
        sources = (OptionSource("command line", "command line", own), *self.sources)
        found = {name: next((s for s in sources if name in s.values), None) for name in KEYS}
        ignored = tuple(_override(sources, found))
        set_by = {name: source for name, source in found.items() if source}
        values = {name: source.values[name] for name, source in set_by.items()}
        preset = preset_named(values.get("preset", KEYS["preset"].default))
        origins = {name: source.origin(name) for name, source in set_by.items()}
        for name, key in KEYS.items():
            if name not in values:
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


def _file(folder: Path, named: str) -> config_file.ConfigFile | None:
    if named == "none":
        return None
    if named and not Path(named).is_file():
        raise UsageError(f"there is no file {named}", where=CONFIG, hint="name a file, or none")
    return config_file.read(Path(named).absolute()) if named else config_file.find(folder)


def _from_environment(variables: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    for name, key in KEYS.items():
        text = variables.get(key.variable, "").strip()
        if text:  # an empty variable sets nothing, as in most shells and CI files
            yield name, _checked(key, key.variable, text, partial(from_text, key, text))


def _from_file(file: config_file.ConfigFile, *, named: bool) -> Iterator[tuple[str, Any]]:
    keys = {key.key: key for key in KEYS.values()}
    for word, value in file.table.items():
        if word not in keys:
            raise UsageError(f"unknown key {word!r}", where=file.title, hint=_nearest_key(word))
        if not named:
            require_own(word, value, file.title, file.path)
        where, read = f"{file.title}, key {word!r}", partial(from_toml, keys[word], value, file.path.parent)
        yield keys[word].name, _checked(keys[word], where, value, read)


def _checked(key: Declaration, where: str, given: Any, read: Callable[[], Any]) -> Any:
    """Returns the value from `read` after the option's own check."""
    try:
        value = read()
        if key.check:
            key.check(value)
    except UsageError as error:
        inside = f" ({error.where})" if error.where and not error.where.startswith("--") else ""
        raise UsageError(error.what + inside, where=where, hint=error.hint) from error
    except ValueError as error:
        raise UsageError(f"it cannot be {to_text(given)}", where=where, hint=str(error)) from error
    return value


def _nearest_key(word: str) -> str:
    called = {word_: key.key for key in KEYS.values() for word_ in (key.key, *key.words)}
    close = difflib.get_close_matches(word.replace("_", "-"), called, n=1, cutoff=0.5)
    return f"did you mean {called[close[0]]!r}?" if close else nearest(word, [k.key for k in KEYS.values()])


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
