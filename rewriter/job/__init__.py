"""One run of `fix`: the stages in order, with what each hands to the next."""

from __future__ import annotations

from rewriter.job.options import Options, Progress
from rewriter.job.run import run

__all__ = ["Options", "Progress", "run"]
