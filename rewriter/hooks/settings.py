"""What a hook is told: the options of `rewriter.fix`, and what to do when it fails."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rewriter.errors import UsageError
from rewriter.pipeline.config import ResolvedOptions, load
from rewriter.pipeline.declaration import declarations
from rewriter.pipeline.options import FixOptions

OWN = frozenset({"model", "output", "in_place", "dry_run", "strict", "progress"})
"""Arguments of `rewriter.fix` that are the hook's business."""

SAMPLES = 32
"""How many samples of `calibration` are used; a DataLoader holds a whole data set."""


@dataclass(frozen=True)
class Settings:
    """How exports are looked at and fixed.

    Attributes:
        fix: Arguments of `rewriter.fix`, such as `{"preset": "trt-bf16", "keep_fp32": ["*/head/*"]}`. Those
            that are not given come from the environment and `[tool.rewriter]`, as on the command line.
        calibration: Samples to measure ranges on: an iterable of arguments of the model, such as a
            DataLoader, or of dicts of arrays by input. None: the example arguments of the export.
        samples: How many of them are used at most.
        prepare: Exchange the norms that are known for equivalents that export as one operator.
        strict: Raise what goes wrong, instead of leaving the plain export with a warning.
        keep_raw: Keep the plain export beside the result, as `<name>.raw.onnx`.
        quiet: Print nothing; warnings are still given.
    """

    fix: Mapping[str, Any] = field(default_factory=dict)
    calibration: Iterable[Any] | None = None
    samples: int = SAMPLES
    prepare: bool = False
    strict: bool = False
    keep_raw: bool = False
    quiet: bool = False

    def check(self) -> None:
        """Hold `fix` to what `rewriter.fix` takes.

        Raises:
            UsageError: an argument that it does not have, or that the hook gives itself.
        """
        known = [name for name in declarations(FixOptions) if name not in OWN]
        for name in self.fix:
            if name not in known:
                raise UsageError(
                    "the hook gives it itself" if name in OWN else "rewriter.fix has no such argument",
                    where=f"fix={{{name!r}: ...}}",
                    hint=f"choose from {', '.join(known)}",
                )
        if self.calibration is not None and self.fix.get("inputs") is not None:
            raise UsageError("samples are given twice", where="calibration=", hint="leave out fix['inputs']")
        if self.samples < 1:
            raise UsageError(f"it cannot be {self.samples}", where="samples=", hint="use at least one")

    def resolve(self, near: Path | None) -> ResolvedOptions:
        """These options and the configuration found upwards from `near`; None: from the current folder.

        Raises:
            UsageError: an argument of `fix` or a key of the file that does not exist.
        """
        self.check()
        return load(near).resolve(**{n: v for n, v in self.fix.items() if n != "inputs"})
