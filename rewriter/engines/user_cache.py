"""The user's cache folder, for files that can be made again."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path


def user_cache(*parts: str) -> Path:
    """A path in the user's cache folder, its folder made: `user_cache("timing", "tensorrt 10.3.cache")`.

    `REWRITER_CACHE` names the folder itself; else it is the platform's: XDG_CACHE_HOME or ~/.cache,
    %LOCALAPPDATA%, ~/Library/Caches. What a file name cannot hold becomes `_`.
    """
    path = _root().joinpath(*(re.sub(r"[^\w.+-]+", "_", part) for part in parts))
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _root() -> Path:
    if given := os.environ.get("REWRITER_CACHE"):
        return Path(given)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData/Local") / "rewriter"
    if sys.platform == "darwin":
        return Path.home() / "Library/Caches/rewriter"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rewriter"
