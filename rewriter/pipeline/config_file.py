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
    """A file with its table."""

    path: Path
    table: Mapping[str, Any]

    @property
    def title(self) -> str:
        return f"{shown(self.path)} {TABLE}" if self.path.name == SHARED else shown(self.path)

    def require_own(self) -> None:
        """Refuses keys that load code or write files in a file of another user.

        Raises:
            UsageError: there is such a key, and the file is such a one.
        """
        for key, value in self.table.items():
            ours = key == "metric" and ":" not in str(value)  # by name
            if key in POWERS and not ours and not is_own(self.path):
                what = f"it {POWERS[key]}, and the file belongs to another user"
                hint = f"give `{key}` on the command line, or name a file that you trust in REWRITER_CONFIG"
                raise UsageError(what, where=f"{self.title}, key {key!r}", hint=hint)


def find(start: Path, named: str = "") -> tuple[ConfigFile | None, tuple[str, ...]]:
    """Returns the configuration file of the project that the folder `start` belongs to, and notes for users.

    The first folder from `start` upwards with such a file or with `.git` is the project's root. In one folder
    `rewriter.toml` comes first. A `pyproject.toml` without `[tool.rewriter]` is skipped. A file of another
    user above `start` is not read.

    Args:
        named: The file that REWRITER_CONFIG names instead; `none`: there is none.

    Raises:
        UsageError: a file on the way cannot be read, is not TOML, or `tool.rewriter` is no table.
    """
    if named == "none":
        return None, ()
    if named:
        if not Path(named).is_file():
            raise UsageError(
                f"there is no file {named}", where="REWRITER_CONFIG", hint="name a file, or none"
            )
        path = Path(named).absolute()
        return read(path) or ConfigFile(path, {}), ()
    start = Path(os.path.abspath(start))  # noqa: PTH100  # without `..`, but with links
    for folder in (start, *start.parents):
        candidates = [folder / name for name in (OWN, SHARED) if _exists(folder / name)]
        if foreign := [path for path in candidates if folder != start and not is_own(path)]:
            note = "is not read: it belongs to another user (REWRITER_CONFIG can name it)"
            return None, (f"{shown(foreign[0])} {note}",)
        files = [file for path in candidates if (file := read(path))]
        if files:
            others = (f"{other.title} is not read: {OWN} beside it comes first" for other in files[1:])
            return files[0], tuple(others)
        if _exists(folder / ".git", folder=True):
            break
    return None, ()


def read(path: Path) -> ConfigFile | None:
    """Reads a configuration file; None for a `pyproject.toml` without the table.

    Raises:
        UsageError: it cannot be read, is not TOML, or `tool.rewriter` is no table.
    """
    table: Any = _toml(path)
    if path.name == SHARED:
        tool = table.get("tool")
        if not isinstance(tool, dict) or "rewriter" not in tool:
            return None
        table = tool["rewriter"]
    if not isinstance(table, dict):
        hint = f"write {TABLE} and keys below"
        raise UsageError("tool.rewriter is not a table", where=shown(path), hint=hint)
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
