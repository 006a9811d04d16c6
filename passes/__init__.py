"""The passes, one file each. `ALL` lists them in the order in which the presets run them."""

from __future__ import annotations

from rewriter.base import Pass
from rewriter.passes.clean_casts import CleanCasts
from rewriter.passes.fold_quantized_bias import FoldQuantizedBias
from rewriter.passes.inline_functions import InlineFunctions
from rewriter.passes.isolate_clip import IsolateClip

ALL: tuple[type[Pass], ...] = (
    InlineFunctions,
    FoldQuantizedBias,
    CleanCasts,
    IsolateClip,
)
"""A new pass is added here, and nowhere else."""
