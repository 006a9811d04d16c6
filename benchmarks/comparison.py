"""What the benchmarks share: errors of outputs, files of stages, and what a failed command printed."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rewriter.ir.model import Array, Model
from rewriter.judge.expected import selects_rows
from rewriter.runtime.figures.outputs import compare
from rewriter.runtime.figures.tolerances import TOLERANCES

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables that limit the threads of numpy's linear algebra and other libraries."""


def last_words(log: Path, exit_code: int) -> str:
    """Last line that a failed command printed, without the hint, which is in the log; "" if it did not fail."""
    if not exit_code:
        return ""
    printed = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    lines = [line for line in printed if line and not line.startswith("what to do:")]
    said = lines[-1].replace(f"{log.parent}/", "") if lines else f"exit code {exit_code}"
    return said[:200]


def errors(model: Model, expected: dict[str, Array], actual: dict[str, Array]) -> dict[str, float | None]:
    """Relative L2 error of each output, None if not finite; rows match as sets for models that select them."""
    actual = {n: a.astype(expected[n].dtype) for n, a in actual.items()}
    tolerance = TOLERANCES["fp16"].value
    rows = compare(expected, actual, tolerance, as_sets=selects_rows(model))
    return {r.name: float(r.relative_l2) if r.finite and math.isfinite(r.relative_l2) else None for r in rows}


def read_json(path: Path) -> dict[str, Any]:
    """Contents of a stage's file; empty if there is no file."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def write_json(path: Path, found: Mapping[str, Any]) -> None:
    """Writes the whole file or none: a stage may be stopped at any moment and continues from these files."""
    temporary = path.with_name(f"{path.name}.part")
    temporary.write_text(json.dumps(found, indent=1) + "\n")
    temporary.replace(path)
