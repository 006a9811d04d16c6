"""Decides which configuration may load code or write files: the user's own project's, and none else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rewriter.errors import UsageError

POWERS = {
    "plugin-lib": "loads code",
    "metric": "runs code",
    "report": "writes a file",
    "save-plan": "writes a file",
}
"""Keys with which a file could do more than choose among options of ours."""


def is_own(path: Path) -> bool:
    """True if the current user owns a file, and the link to it if it is one.

    Windows does not say; there every file is the user's own.
    """
    if not hasattr(os, "geteuid"):
        return True
    return all(owner == os.geteuid() for owner in (path.stat().st_uid, path.lstat().st_uid))


def require_own(key: str, value: Any, title: str, path: Path) -> None:
    """Refuses a key that loads code or writes files in a file of another user.

    Raises:
        UsageError: it is such a key, and such a file.
    """
    power = POWERS.get(key)
    if key == "metric" and ":" not in str(value):
        return  # one of ours, by name
    if power and not is_own(path):
        raise UsageError(
            f"it {power}, and the file belongs to another user",
            where=f"{title}, key {key!r}",
            hint=f"give --{key} on the command line, or name the file in REWRITER_CONFIG if you trust it",
        )
