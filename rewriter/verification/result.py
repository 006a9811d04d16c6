"""What `verify` hands back: plain data that the terminal, JSON and callers read alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rewriter.data.source import DataSource
from rewriter.engines.protocol import Latency
from rewriter.figures.compare import OutputComparison
from rewriter.figures.statistics import OutputStatistics
from rewriter.figures.tolerances import Tolerance
from rewriter.verification.verdict import Check, Verdict


@dataclass(frozen=True)
class BuildRun:
    """One build of the fixed model, run over all samples.

    Attributes:
        status, problem: As in `engines.protocol.Outcome`.
        error: Value of the tolerance's metric, the worst over outputs and samples; None if it did not run.
    """

    number: int
    status: str
    problem: str
    error: float | None
    latency: Latency | None


@dataclass(frozen=True)
class VerifyResult:
    """The outcome of `verify`.

    Attributes:
        engine: Library and version that computed, or `emulation`. `device`: what on.
        data: The samples.
        outputs: The worst sample and build of each output, in the order of the model's outputs.
        judged: What the verdict says of each output; as sets of rows for models that select rows.
        builds: Of the fixed model.
        latency: Of the fixed model's first build; `reference_latency` of the original in FP32, without
            TF32. None where nothing was timed.
        verdict: The checks: `reference`, `run` or `emulation`, `build`.
        warnings: Sentences that the user should read: the first says it if no GPU was used.
        seconds: Wall time by stage, in order.
    """

    original: Path | None
    fixed: Path | None
    engine: str
    device: str
    tolerance: Tolerance
    data: DataSource
    outputs: tuple[OutputStatistics, ...]
    judged: tuple[OutputComparison, ...]
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
