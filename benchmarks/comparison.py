"""Cases of the side by side: a model, its samples with one held out, and the errors of outputs on that sample."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rewriter.errors import InputsError
from rewriter.figures.outputs import compare
from rewriter.figures.tolerances import TOLERANCES
from rewriter.model import Array, Model
from rewriter.verification.expected import selects_rows


@dataclass(frozen=True)
class Case:
    """A model of the benchmark: its file, its samples, and the folder for the results of all stages.

    Outputs are compared on the first sample. No tool sees it: tools get `calibration`.
    """

    path: Path
    samples: Path
    work: Path

    @property
    def name(self) -> str:
        return self.work.name

    @property
    def calibration(self) -> Path:
        """The folder of samples that every tool gets."""
        return self.work / "calibration"

    def hold_out(self) -> None:
        """Creates `calibration`: links to all samples but the first.

        Raises:
            InputsError: there are fewer than two.
        """
        _first, *others = _archives(self.samples)
        if not others:
            raise InputsError(
                "one sample: outputs are compared on the first, and tools get the others",
                where=str(self.samples),
                hint="models/build.py --samples 4",
            )
        self.calibration.mkdir(parents=True, exist_ok=True)
        for sample in others:
            link = self.calibration / sample.name
            if not link.exists():
                link.symlink_to(sample.resolve())


def _archives(samples: Path) -> list[Path]:
    found = sorted(samples.glob("*.npz"))
    if not found:
        raise InputsError("no samples here", where=str(samples), hint="it has to hold 0.npz, 1.npz ...")
    return found


def feeds_of(samples: Path) -> dict[str, Array]:
    """The first sample of a folder, on which outputs are compared."""
    with np.load(_archives(samples)[0]) as archive:
        return dict(archive)


def errors(model: Model, expected: dict[str, Array], actual: dict[str, Array]) -> dict[str, float | None]:
    """Relative L2 error of each output, None if not finite; rows match as sets for models that select them."""
    actual = {n: a.astype(expected[n].dtype) for n, a in actual.items()}
    tolerance = TOLERANCES["fp16"].value
    rows = compare(expected, actual, tolerance, as_sets=selects_rows(model))
    return {r.name: float(r.relative_l2) if r.finite and math.isfinite(r.relative_l2) else None for r in rows}


def worst(found: Mapping[str, Any] | None) -> float | None:
    """The worst output's error; infinity if one is not finite, None if nothing was measured."""
    if not found or not found.get("errors"):
        return None
    return max(math.inf if e is None else e for e in found["errors"].values())


def read_json(path: Path) -> dict[str, Any]:
    """Contents of a stage's file; empty if there is no file."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def write_json(path: Path, found: Mapping[str, Any]) -> None:
    """Writes the whole file or none: a stage may be stopped at any moment and continues from these files."""
    temporary = path.with_name(f"{path.name}.part")
    temporary.write_text(json.dumps(found, indent=1) + "\n")
    temporary.replace(path)
