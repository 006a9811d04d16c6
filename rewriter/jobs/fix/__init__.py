"""One run of `fix`."""

from __future__ import annotations

from rewriter.jobs.fix.options import Options
from rewriter.jobs.fix.stages import run

__all__ = ["Options", "run"]
