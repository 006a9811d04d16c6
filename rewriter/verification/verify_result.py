"""The result of `verify`, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rewriter.data.source import DataSource
from rewriter.engines.protocol import Latency
from rewriter.figures.outputs import OutputStatistics
from rewriter.figures.tolerances import Tolerance
from rewriter.verification.judge import BuildRun
from rewriter.verification.verdict import Check, Verdict


@dataclass(frozen=True)
class VerifyResult:
    """The outcome of `verify`.

    Attributes:
        engine: Library and version, or `emulation`. `device`: the GPU, or `CPU`.
        data: The samples.
        outputs: The worst sample and build of each output, in the order of the model's outputs.
        builds: Of the fixed model.
        latency: Of the fixed model's first build; `reference_latency`: of the original in FP32, without
            TF32. None if not timed.
        verdict: The checks: `reference`, `run` or `emulation`, `build`.
        warnings: Sentences for the user; the first one reports if no GPU was used.
        seconds: Wall time by stage, in order.
    """

    original: Path | None
    fixed: Path | None
    engine: str
    device: str
    tolerance: Tolerance
    data: DataSource
    outputs: tuple[OutputStatistics, ...]
    builds: tuple[BuildRun, ...]
    latency: Latency | None
    reference_latency: Latency | None
    verdict: Verdict
    warnings: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """At least one check was made and none failed."""
        return self.verdict.passed

    @property
    def checks(self) -> tuple[Check, ...]:
        return self.verdict.checks
