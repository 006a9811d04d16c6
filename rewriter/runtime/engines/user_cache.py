"""The user's cache folder, for files that can be made again."""

from __future__ import annotations

import os
import re
from pathlib import Path

VARIABLE = "REWRITER_CACHE"


def user_cache(*parts: str) -> Path:
    """A path in the user's cache folder, its folder made: `user_cache("timing", "tensorrt 10.3.cache")`.

    `REWRITER_CACHE` names the folder itself; else it is the platform's: ~/.cache/rewriter, for example. What
    a file name cannot hold becomes `_`.
    """
    path = _root().joinpath(*(re.sub(r"[^\w.+-]+", "_", part) for part in parts))
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _root() -> Path:
    if given := os.environ.get(VARIABLE):
        return Path(given)
    from platformdirs import user_cache_path

    return user_cache_path("rewriter", appauthor=False)
