"""What is in force: the sources of options in their order, and where each value came from."""

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
from rewriter.pipeline.config import files
from rewriter.pipeline.config.settings import KEYS, PREFIX, Command, Key, Settings
from rewriter.pipeline.config.values import from_text, from_toml, to_text
from rewriter.pipeline.pass_options import nearest
from rewriter.pipeline.presets import DEFAULT_OPSETS, DEFAULT_PRESET, preset_named

CONFIG = f"{PREFIX}CONFIG"
"""Variable that names the file to read in place of the one that would be found; `none` reads none."""

HIDES: Mapping[str, tuple[str, ...]] = {
    "preset": ("passes",),
    "plan": ("keep_fp32", "keep_fp32_op", "precision", "io", "tolerance", "max_latency_cost"),
    "tolerance": ("max_latency_cost",),
    "max_latency_cost": ("tolerance",),
    "input_shapes": ("inputs",),
}
"""Options that make sense of others: set in one source, they put out of force the others of later sources."""

ALIKE = 0.75
"""From this likeness on (`difflib`), an unknown variable is a misspelt one, and not another program's."""

SourceKind = Literal["command line", "environment", "file"]


@dataclass(frozen=True)
class Source:
    """One place that sets options: values by the names of the fields of `Settings`."""

    kind: SourceKind
    title: str
    values: Mapping[str, Any]

    def where(self, name: str) -> str:
        """An option as the user wrote it there."""
        key = KEYS[name]
        places = {"environment": key.variable, "file": f"{self.title}, key {key.key!r}"}
        return places.get(self.kind, f"--{key.key}")


@dataclass(frozen=True)
class Origin:
    """Where a value came from: one of the sources, `preset NAME`, or `default`.

    Attributes:
        text: For people: `environment (REWRITER_OPSET)`, `pyproject.toml [tool.rewriter]`, `preset accurate`.
        source: None for presets and defaults.
    """

    text: str
    source: Source | None = None


@dataclass(frozen=True)
class InForce:
    """Every option with its value and its origin.

    Attributes:
        settings: The values, those of the preset and the defaults included.
        origins: By the names of the fields of `Settings`.
        hidden: A sentence for each value that another option put out of force.
    """

    settings: Settings
    origins: Mapping[str, Origin]
    hidden: tuple[str, ...]

    def arguments(self, command: Command) -> dict[str, Any]:
        """Keyword arguments of `rewriter.fix`, `scan` or `verify`, without `report` and `fail_on`.

        For `fix` and `verify`, what the user set: the rest is up to them and the preset. For `scan`, which
        has no presets, every value, where the preset's precision is one to scan for.
        """
        values = {name: getattr(self.settings, name) for name, key in KEYS.items() if command in key.of}
        values = {name: value for name, value in values.items() if name not in ("report", "fail_on")}
        if command != "scan":
            return {name: value for name, value in values.items() if self.origins[name].source}
        del values["preset"]
        return {n: v for n, v in values.items() if v is not None and (n, v) != ("precision", "fp32")}

    def where(self, name: str) -> str:
        """An option as the user wrote it; as on the command line for presets and defaults."""
        source = self.origins[name].source
        return source.where(name) if source else f"--{KEYS[name].key}"

    def told(self) -> Iterator[str]:
        """A sentence for each source but the command line that decides something, and for what is hidden."""
        by_source: dict[str, list[str]] = {}
        for name, origin in self.origins.items():
            if origin.source and origin.source.kind != "command line":
                by_source.setdefault(origin.source.title, []).append(KEYS[name].key)
        yield from (f"{title} sets {', '.join(keys)}" for title, keys in by_source.items())
        yield from self.hidden

    @contextmanager
    def blaming(self) -> Iterator[None]:
        """An error about an option names the place that set it, if that is not the command line."""
        try:
            yield
        except UsageError as error:
            name = (error.where or "").removeprefix("--").replace("-", "_")
            hint = error.hint
            for other in (other for other, names in HIDES.items() if name in names):
                source = self.origins[other].source
                if source and source.kind != "command line":
                    hint = f"{hint} ({other} is set by {source.where(other)})"
            where = self.where(name) if name in self.origins else error.where
            raise UsageError(error.what, where=where, hint=hint) from error


@dataclass(frozen=True)
class Configuration:
    """What the environment and a file say.

    Attributes:
        sources: The environment, and the file if there is one.
        file: The file that was read.
        warnings: Sentences for the user.
    """

    sources: tuple[Source, ...]
    file: Path | None = None
    warnings: tuple[str, ...] = ()

    def with_options(self, **given: Any) -> InForce:
        """What is in force when the command line gives these options; None or an empty list is none."""
        own = {name: value for name, value in given.items() if value not in (None, [], (), {})}
        sources = (Source("command line", "command line", own), *self.sources)
        found = {name: _first(sources, name) for name in KEYS}
        hidden = tuple(_hide(sources, found))
        set_here = {name: source for name, source in found.items() if source}
        values = {name: source.values[name] for name, source in set_here.items()}
        preset = preset_named(values.get("preset", DEFAULT_PRESET))
        origins = {name: Origin(_text(source, KEYS[name]), source) for name, source in set_here.items()}
        for name, key in KEYS.items():
            if name not in values:
                values[name] = key.default if key.default is not None else preset.choose(name)
                origins[name] = Origin(f"preset {preset.name}" if name in preset.defaults else "default")
        if values["opset"] is None:
            values["opset"] = DEFAULT_OPSETS[values["precision"]]
        return InForce(Settings(**values), origins, hidden)


def load(near: Path | None = None, environment: Mapping[str, str] | None = None) -> Configuration:
    """Read the environment and the file found upwards from the folder of `near`.

    Args:
        near: A model, which need not exist, or a folder; None: the current folder.
        environment: In place of `os.environ`.

    Raises:
        UsageError: an unknown key, or a value of the wrong type or without sense; the message names the
            file or the variable.
    """
    variables = os.environ if environment is None else environment
    where = Path.cwd() if near is None else near
    file = _file(where if where.is_dir() else where.parent, variables.get(CONFIG, ""))
    sources = [Source("environment", "the environment", dict(_from_environment(variables)))]
    if file:
        sources.append(Source("file", file.title, dict(_from_file(file))))
    warnings = (*(file.notes if file else ()), *_misspelt(variables))
    return Configuration(tuple(sources), file.path if file else None, warnings)


def _file(folder: Path, named: str) -> files.File | None:
    if named == "none":
        return None
    if named and not Path(named).is_file():
        raise UsageError(f"there is no file {named}", where=CONFIG, hint="name a file, or none")
    return files.read(Path(named).absolute()) if named else files.find(folder)


def _from_environment(variables: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    for name, key in KEYS.items():
        text = variables.get(key.variable, "").strip()
        if text:  # an empty variable is as good as none, as in most shells and CI files
            yield name, _checked(key, key.variable, text, partial(from_text, key, text))


def _from_file(file: files.File) -> Iterator[tuple[str, Any]]:
    names = {key.key: name for name, key in KEYS.items()}
    for word, value in file.table.items():
        if word not in names:
            raise UsageError(f"unknown key {word!r}", where=file.title, hint=_nearest_key(word))
        key = KEYS[names[word]]
        where = f"{file.title}, key {word!r}"
        folder = file.path.parent
        yield key.name, _checked(key, where, value, partial(from_toml, key, value, folder))


def _checked(key: Key, where: str, given: Any, read: Callable[[], Any]) -> Any:
    """The value that `read` gives, if it makes sense."""
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
            close = difflib.get_close_matches(name.removeprefix(PREFIX), ends, n=1, cutoff=ALIKE)
            if close:
                yield f"the variable {name} is unknown and not used: did you mean {PREFIX}{close[0]}?"


def _first(sources: tuple[Source, ...], name: str) -> Source | None:
    return next((source for source in sources if name in source.values), None)


def _hide(sources: tuple[Source, ...], found: dict[str, Source | None]) -> Iterator[str]:
    """Take out of `found` what `HIDES` puts out of force, with a sentence for each."""
    for name, others in HIDES.items():
        over = found[name]
        for other in others if over else ():
            under = found[other]
            if over and under and sources.index(over) < sources.index(under):
                found[other] = None
                yield f"{under.where(other)} is not used: {over.where(name)} takes its place"


def _text(source: Source, key: Key) -> str:
    return f"environment ({key.variable})" if source.kind == "environment" else source.title
