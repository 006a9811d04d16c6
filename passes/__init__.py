"""The passes, one file each. `ALL` lists them in the order in which the presets run them."""

from __future__ import annotations

from rewriter.base import Pass
from rewriter.passes.isolate_clip import IsolateClip

ALL: tuple[type[Pass], ...] = (IsolateClip,)
"""A new pass is added here, and nowhere else."""
