"""Configuration: options from files and the environment, for the command line and for hooks.

    resolved = load().resolve(preset="accurate")
    rewriter.fix(model_path, output, **resolved.arguments("fix"))

The first of these sources that sets an option decides: the command line, the environment (`REWRITER_*`), the
file of the project one works in, the preset, and the default of `rewriter.fix`.
`rewriter.fix` and `rewriter.scan` themselves read neither files nor the environment.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rewriter.base.errors import SLIP, RewriterError, UsageError, did_you_mean
from rewriter.ir.reading import read_toml
from rewriter.pipeline.options import JOBS, KEYS, RANDOM_DATA, Command
from rewriter.pipeline.presets import DEFAULT_OPSETS, OTHERWISE, preset_named
from rewriter.pipeline.schema import PREFIX, Text, declarations, read, read_table

CONFIG = f"{PREFIX}CONFIG"
"""Variable that names the configuration file, in place of the nearest one; with `none`, no file is read."""

OTHER_VARIABLES = ("CONFIG", "CACHE", "HOOK", "NIGHTLY")
"""Variables of our prefix that are no options: of this module, the cache, recorded scripts and the tests."""

OWN, SHARED = "rewriter.toml", "pyproject.toml"
TABLE = "[tool.rewriter]"

POWERS = {"plugin-lib": "loads code", "metric": "runs code", "report": "writes a file"}
"""Keys with which a file could do more than choose among options of ours."""

OVERRIDES: Mapping[str, tuple[str, ...]] = {
    "preset": ("passes",),
    "plan": (
        *("keep_fp32", "keep_fp32_op", "lower", "lower_op", "plugin_types"),
        *("precision", "io", "tolerance", "max_latency_cost"),
    ),
    "tolerance": ("max_latency_cost",),
    "max_latency_cost": ("tolerance",),
    **dict.fromkeys(RANDOM_DATA, ("inputs",)),
    "inputs": RANDOM_DATA,
}
"""Options that replace others: if one is set, the listed options of later sources are ignored."""


@dataclass(frozen=True)
class Source:
    """The values that a source sets, by name; the last sources are the preset and the defaults."""

    kind: Literal["command line", "environment", "file", "preset", "default"]
    title: str
    values: Mapping[str, Any]

    @property
    def is_users(self) -> bool:
        return self.kind not in ("preset", "default")

    def where(self, name: str) -> str:
        """Returns the option as the user wrote it there."""
        key = KEYS[name]
        texts = {"environment": key.variable, "file": f"{self.title}, key {key.key!r}"}
        return texts.get(self.kind, f"`{key.key}`")

    def named(self, name: str) -> str:
        """The name in messages: `environment (REWRITER_OPSET)`, `pyproject.toml [tool.rewriter]`."""
        return f"environment ({KEYS[name].variable})" if self.kind == "environment" else self.title


@dataclass(frozen=True)
class ResolvedOptions:
    """Every option with its value and its source, by name."""

    values: Mapping[str, Any]
    sources: Mapping[str, Source]
    ignored: tuple[str, ...]  # a sentence for each value that another option overrides
    one_run: dict[str, Any]  # values of the command line for options that no file may set
    configuration: Configuration  # the files and variables that were read

    def arguments(self, command: Command) -> dict[str, Any]:
        """Returns keyword arguments of `rewriter.fix`, `scan` or `verify`.

        For `fix` and `verify` these are the values that the user set; the preset and the function decide the
        rest. For `scan`, which has no presets, they are all values but a precision that it cannot scan for.
        """
        values = {name: self.values[name] for name in declarations(JOBS[command]) if name in KEYS}
        if command != "scan":
            return self.one_run | {n: value for n, value in values.items() if self.sources[n].is_users}
        return {n: v for n, v in values.items() if v is not None and (n, v) != ("precision", "fp32")}

    def where(self, name: str) -> str:
        return self.sources[name].where(name)

    def messages(self) -> Iterator[str]:
        """Yields a sentence for each source but the command line, and for each ignored value."""
        by_source: dict[str, list[str]] = {}
        for name, source in self.sources.items():
            if source.kind in ("environment", "file"):
                by_source.setdefault(source.title, []).append(KEYS[name].key)
        yield from (f"{title} sets {', '.join(keys)}" for title, keys in by_source.items())
        yield from self.ignored

    @contextmanager
    def errors_name_sources(self) -> Iterator[None]:
        """Makes errors about an option name the file or variable that set it."""
        try:
            yield
        except RewriterError as error:
            names = [key.replace("-", "_") for key in error.options]
            for other, hidden in OVERRIDES.items():
                if {*hidden} & {*names} and self.sources[other].kind in ("environment", "file"):
                    error.hint = f"{error.hint} ({other} is set by {self.where(other)})"
            texts = [self.where(n) for n in names if n in self.sources and self.sources[n].is_users]
            error.source = error.source or ", ".join(texts)
            raise


@dataclass(frozen=True)
class Configuration:
    """The options that the environment, and the file if there is one, set."""

    sources: tuple[Source, ...]
    file: Path | None = None
    warnings: tuple[str, ...] = ()

    def resolve(self, **own: Any) -> ResolvedOptions:
        """Returns every option with its value and its source; `own` are the command line's options."""
        command = {n: v for n, v in own.items() if n in KEYS and v not in (None, [], ())}
        users = (Source("command line", "command line", command), *self.sources)
        chosen = {name: source for source in reversed(users) for name in source.values}
        ignored = tuple(_override(users, chosen))
        named = chosen["preset"].values["preset"] if "preset" in chosen else KEYS["preset"].default
        preset = preset_named(named)
        defaults = {n: OTHERWISE.get(n) if key.default is None else key.default for n, key in KEYS.items()}
        rest = (Source("default", "default", defaults), Source("preset", f"preset {named}", preset.defaults))
        sources = {name: source for source in rest for name in source.values} | chosen
        values = {name: sources[name].values[name] for name in KEYS}
        if values["opset"] is None:
            values["opset"] = DEFAULT_OPSETS[values["precision"]]
        one_run = {n: v for n, v in own.items() if n not in KEYS}
        return ResolvedOptions(values, {n: sources[n] for n in KEYS}, ignored, one_run, self)


def _override(users: tuple[Source, ...], chosen: dict[str, Source]) -> Iterator[str]:
    """Removes overridden options from `chosen`, and yields a sentence for each."""
    for name, others in OVERRIDES.items():
        for other in others:
            over, under = chosen.get(name), chosen.get(other)
            if over and under and users.index(over) < users.index(under):
                del chosen[other]
                yield f"{under.where(other)} is not used: {over.where(name)} takes its place"


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
    path, notes = _find(Path() if folder is None else folder, variables.get(CONFIG, ""))
    notes += tuple(_unknown_variables(variables))
    # an empty variable sets nothing, as in most shells and CI files
    texts = {name: text for name, key in KEYS.items() if (text := variables.get(key.variable, "").strip())}
    values = {name: read(KEYS[name], Text(text), KEYS[name].variable) for name, text in texts.items()}
    sources = [Source("environment", "the environment", values)]
    if path:
        table = _table(path) or {}
        title = f"{shown(path)} {TABLE}" if path.name == SHARED else shown(path)
        if not variables.get(CONFIG) and not is_own(path):
            _require_harmless(table, title)
        keys = {key.key: key for key in KEYS.values()}
        sources.append(Source("file", title, read_table(keys, table, title, path.parent)))
    return Configuration(tuple(sources), path, notes)


def _unknown_variables(variables: Mapping[str, str]) -> Iterator[str]:
    """Yields a note for each variable of our prefix that sets nothing; UsageError: it is misspelt."""
    keys = {key.variable.removeprefix(PREFIX) for key in KEYS.values()}
    for name in sorted(variables):
        own = name.removeprefix(PREFIX)
        if own == name or own in keys or own in OTHER_VARIABLES:
            continue
        if near := did_you_mean(own, keys, SLIP):
            hint = near.replace("mean '", f"mean '{PREFIX}")
            raise UsageError("there is no such variable", where=name, hint=hint)
        yield f"{name} sets nothing: no option has this name"


def _find(start: Path, named: str) -> tuple[Path | None, tuple[str, ...]]:
    """Returns the configuration file of the project that the folder `start` belongs to, and notes for users.

    The first folder from `start` upwards with such a file or with `.git` is the project's root. In one folder
    `rewriter.toml` comes first. A `pyproject.toml` without `[tool.rewriter]` is skipped. A file of another
    user above `start` is not read.

    Args:
        named: The file that REWRITER_CONFIG names instead; `none`: there is none.
    """
    if named == "none":
        return None, ()
    if named:
        if not Path(named).is_file():
            raise UsageError(f"there is no file {named}", where=CONFIG, hint="name a file, or none")
        return Path(named).absolute(), ()
    try:
        start = Path(os.path.abspath(start))  # noqa: PTH100  # without `..`, but with links
    except OSError:  # the current folder was removed
        return None, ()
    for folder in (start, *start.parents):
        # os.path, as a folder may not be readable
        here = [folder / name for name in (OWN, SHARED) if os.path.isfile(folder / name)]  # noqa: PTH113
        if foreign := [path for path in here if folder != start and not is_own(path)]:
            note = f"is not read: it belongs to another user ({CONFIG} can name it)"
            return None, (f"{shown(foreign[0])} {note}",)
        files = [path for path in here if _table(path) is not None]
        if files:
            other = f"{shown(files[-1])} {TABLE} is not read: {OWN} beside it comes first"
            return files[0], (other,) if len(files) > 1 else ()
        if os.path.exists(folder / ".git"):  # noqa: PTH110  # a file in a worktree
            break
    return None, ()


def _table(path: Path) -> Mapping[str, Any] | None:
    """The keys of a configuration file; None for a `pyproject.toml` without the table."""
    table: Any = read_toml(path, f"repair it, or name another file with {CONFIG}", shown(path))
    if path.name == SHARED:
        table = table.get("tool", {})
        table = table.get("rewriter") if isinstance(table, dict) else None
    if table is not None and not isinstance(table, dict):
        hint = f"write {TABLE} and keys below"
        raise UsageError("tool.rewriter is not a table", where=shown(path), hint=hint)
    return table


def _require_harmless(table: Mapping[str, Any], title: str) -> None:
    """Refuses keys that load code or write files, in a file of another user."""
    for key, value in table.items():
        by_name = key == "metric" and ":" not in str(value)
        if key in POWERS and not by_name:
            what = f"it {POWERS[key]}, and the file belongs to another user"
            hint = f"give `{key}` on the command line, or name a file that you trust in {CONFIG}"
            raise UsageError(what, option=key, source=f"{title}, key {key!r}", hint=hint)


def shown(path: Path) -> str:
    """The path, relative to the current folder if it is inside."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def is_own(path: Path) -> bool:
    """True if the current user owns a file, and the link to it if it is one.

    Windows does not say; there every file is the user's own.
    """
    if not hasattr(os, "geteuid"):
        return True
    return all(owner == os.geteuid() for owner in (path.stat().st_uid, path.lstat().st_uid))
