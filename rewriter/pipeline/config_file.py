"""Finds the configuration file: `rewriter.toml`, or `pyproject.toml` with a table `[tool.rewriter]`.

A file may load code or write files if it is the user's own, and no other may.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewriter.ir.errors import UsageError

OWN, SHARED = "rewriter.toml", "pyproject.toml"
TABLE = "[tool.rewriter]"

POWERS = {
    "plugin-lib": "loads code",
    "metric": "runs code",
    "report": "writes a file",
    "save-plan": "writes a file",
}
"""Keys with which a file could do more than choose among options of ours."""


@dataclass(frozen=True)
class ConfigFile:
    """A file with its table; `notes` name a file that was not read, `read` is False if that is this one."""

    path: Path
    table: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    read: bool = True

    @property
    def title(self) -> str:
        return f"{shown(self.path)} {TABLE}" if self.path.name == SHARED else shown(self.path)


def find(start: Path) -> ConfigFile | None:
    """Returns the configuration file of the project that the folder `start` belongs to.

    The first folder from `start` upwards with such a file or with `.git` is the project's root. In one folder
    `rewriter.toml` comes first. A `pyproject.toml` without `[tool.rewriter]` is skipped. A file of another
    user above `start` is not read.

    Raises:
        UsageError: a file on the way cannot be read.
    """
    start = Path(os.path.abspath(start))  # noqa: PTH100  # without `..`, but with links
    for folder in (start, *start.parents):
        candidates = [folder / name for name in (OWN, SHARED) if _exists(folder / name)]
        foreign = [path for path in candidates if folder != start and not is_own(path)]
        own = read(folder / OWN) if folder / OWN in candidates and not foreign else None
        shared = _shared(folder / SHARED) if not foreign else None
        if own and shared:
            note = f"{shared.title} is not read: {OWN} beside it comes first"
            return ConfigFile(own.path, own.table, (note,))
        if own or shared:
            return own or shared
        if foreign:
            note = (
                f"{shown(foreign[0])} is not read: it belongs to another user (REWRITER_CONFIG can name it)"
            )
            return ConfigFile(foreign[0], {}, (note,), read=False)
        if _exists(folder / ".git", folder=True):
            return None
    return None


def read(path: Path) -> ConfigFile:
    """Reads a named configuration file; a `pyproject.toml` without the table sets nothing.

    Raises:
        UsageError: it cannot be read, is not TOML, or `tool.rewriter` is no table.
    """
    return (_shared(path) or ConfigFile(path, {})) if path.name == SHARED else ConfigFile(path, _toml(path))


def _shared(path: Path) -> ConfigFile | None:
    if not _exists(path):
        return None
    tool = _toml(path).get("tool")
    if not isinstance(tool, dict) or "rewriter" not in tool:
        return None
    table = tool["rewriter"]
    if not isinstance(table, dict):
        raise UsageError(
            "tool.rewriter is not a table", where=shown(path), hint=f"write {TABLE} and keys below"
        )
    return ConfigFile(path, table)


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        hint = "repair it, or name another file with REWRITER_CONFIG"
        raise UsageError(f"it is not TOML: {error}", where=shown(path), hint=hint) from error
    except OSError as error:
        raise UsageError(
            f"it cannot be read: {error.strerror}",
            where=shown(path),
            hint="check its permissions, or name another file with REWRITER_CONFIG",
        ) from error


def shown(path: Path) -> str:
    """Returns the path, relative to the current folder if it is inside."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _exists(path: Path, *, folder: bool = False) -> bool:
    """True for a file, or for anything where `folder` is set: `.git` is a file in a worktree."""
    try:
        return path.exists() if folder else path.is_file()
    except OSError:  # no permission for the folder
        return False


def is_own(path: Path) -> bool:
    """True if the current user owns a file, and the link to it if it is one.

    Windows does not say; there every file is the user's own.
    """
    if not hasattr(os, "geteuid"):
        return True
    return all(owner == os.geteuid() for owner in (path.stat().st_uid, path.lstat().st_uid))


def require_own(key: str, value: Any, file: ConfigFile) -> None:
    """Refuses a key that loads code or writes files in a file of another user.

    Raises:
        UsageError: it is such a key, and such a file.
    """
    power = POWERS.get(key)
    if key == "metric" and ":" not in str(value):
        return  # one of ours, by name
    if power and not is_own(file.path):
        raise UsageError(
            f"it {power}, and the file belongs to another user",
            where=f"{file.title}, key {key!r}",
            hint=f"give `{key}` on the command line, or name the file in REWRITER_CONFIG if you trust it",
        )
