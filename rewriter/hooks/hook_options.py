"""Options of every hook: the arguments of `rewriter.fix`, and how to handle samples and failures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rewriter.errors import UsageError
from rewriter.pipeline.config import ResolvedOptions, load
from rewriter.pipeline.options import FixOptions
from rewriter.pipeline.schema import declarations

OWN = frozenset({"model", "output", "in_place", "dry_run", "strict", "progress"})
"""Arguments of `rewriter.fix` that the hook sets itself."""

SAMPLES = 32
"""Most samples used of `calibration`, since a DataLoader holds a whole data set."""


@dataclass(frozen=True)
class HookOptions:
    """How exports are inspected and fixed.

    Attributes:
        fix: Arguments of `rewriter.fix`, such as `{"preset": "trt-bf16", "keep_fp32": ["*/head/*"]}`. The
            others come from the environment and `[tool.rewriter]`, as on the command line.
        calibration: Samples for measuring ranges: an iterable of arguments of the model, such as a
            DataLoader, or of dicts of arrays by input. None: the example arguments of the export.
        samples: Most samples to use.
        prepare: Replace recognised norms by equivalents that export as one operator.
        strict: Raise errors, instead of keeping the plain export with a warning.
        keep_raw: Keep the plain export beside the result, as `<name>.raw.onnx`.
        quiet: Print nothing; warnings are still issued.
    """

    fix: Mapping[str, Any] = field(default_factory=dict)
    calibration: Iterable[Any] | None = None
    samples: int = SAMPLES
    prepare: bool = False
    strict: bool = False
    keep_raw: bool = False
    quiet: bool = False

    @classmethod
    def of(cls, preset: str | None, fix: Mapping[str, Any] | None, options: Mapping[str, Any]) -> HookOptions:
        """Options as every hook takes them; `preset` is short for `fix={"preset": ...}`."""
        return cls({**({"preset": preset} if preset else {}), **(fix or {})}, **options)

    def check(self) -> HookOptions:
        """Returns the options if `rewriter.fix` accepts `fix`.

        Raises:
            UsageError: `rewriter.fix` lacks an argument, or the hook sets it itself.
        """
        known = [name for name in declarations(FixOptions) if name not in OWN]
        for name in self.fix:
            if name not in known:
                raise UsageError(
                    "the hook sets it itself" if name in OWN else "rewriter.fix has no such argument",
                    where=f"fix={{{name!r}: ...}}",
                    hint=f"choose from {', '.join(known)}",
                )
        if self.calibration is not None and self.fix.get("inputs") is not None:
            raise UsageError("samples are given twice", where="calibration=", hint="remove fix['inputs']")
        if self.samples < 1:
            raise UsageError(f"it cannot be {self.samples}", where="samples=", hint="use at least one")
        return self

    def resolve(self) -> ResolvedOptions:
        """These options over the configuration of the project that one works in.

        Raises:
            UsageError: `fix` or the file has an unknown argument.
        """
        self.check()
        return load().resolve(**{n: v for n, v in self.fix.items() if n != "inputs"})
