"""The size of a suite: small in `make test`, large in `make nightly`."""

from __future__ import annotations

import os

NIGHTLY = os.environ.get("REWRITER_NIGHTLY") == "1"


def sized(usual: int, nightly: int) -> int:
    """The number of examples of this run."""
    return nightly if NIGHTLY else usual
