"""Explains the warnings of TensorRT's builder that concern precision."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

NORM_IN_FP16 = "layernorm nodes in FP16"
"""Part of the builder's warning about a decomposed norm whose squares may overflow."""

ROUTINE = (
    "Int64 binding",
    "will not be queryable",
    "after self-attention with FP16 Reduce or Pow",
    "encountered issues when converting weights between types",
)
"""Parts of warnings that a user can do nothing about, or that only repeat another one."""

PRECISION = (
    (
        r"overflow in FP16|Clipping to finite FP16 range",
        "a weight does not fit FP16 and was clipped: keep the node that reads it in FP32 (`keep-fp32`)",
    ),
    (
        r"less than smallest positive FP16|minimum subnormal",
        "weights are too small for FP16 and were rounded up or to 0: their products lose what they held",
    ),
    (r"[Ss]ubnormal FP16", "weights are subnormal in FP16 and keep only a few bits"),
    (r"out of range\. Clamping to", "an integer constant does not fit INT32 and was clamped"),
)
"""Patterns of warnings, as TensorRT's builder and its ONNX parser write them, and what each means. A line of
the log may hold several."""


def precision_warnings(warnings: Iterable[str]) -> Iterator[str]:
    """Explanations of the warnings about precision, each with TensorRT's text."""
    for warning in warnings:
        meanings = [meaning for pattern, meaning in PRECISION if re.search(pattern, warning)]
        if meanings:
            yield f"precision: {'; '.join(meanings)} (TensorRT: {warning})"


def other_warnings(warnings: Iterable[str]) -> Iterator[str]:
    """Warnings that are neither routine nor about precision, nor judged in `build_check`."""
    known = "|".join(pattern for pattern, _ in PRECISION)
    for warning in warnings:
        if not any(part in warning for part in (*ROUTINE, NORM_IN_FP16)) and not re.search(known, warning):
            yield f"warning: {warning}"
