"""One run of `fix`."""

from __future__ import annotations

from rewriter.job.options import Options
from rewriter.job.stages import run

__all__ = ["Options", "run"]
