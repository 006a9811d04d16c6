"""What `verify` hands back: plain data that the terminal, JSON and callers read alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rewriter.engines.protocol import Latency
from rewriter.result import Check, DataSource, OutputComparison, Verdict


@dataclass(frozen=True)
class Tolerance:
    """What the fixed model's outputs are held to, and who says so.

    Attributes:
        metric: Name in `METRICS`.
        source: The measurement or the option that the value comes from.
    """

    value: float
    metric: str
    source: str


@dataclass(frozen=True)
class OutputStatistics:
    """How far one output is from the original's, in one sample of one build; floats in the output's unit.

    What is not finite in the original is left out of all figures, for it must be the same.

    Attributes:
        sample, build: Numbers from 0.
        not_finite: How many elements are NaN or infinite where the original's are finite, or the reverse.
        relative_l2: ||fixed - original|| / ||original||; infinite if `not_finite`.
        max_abs: Largest absolute difference, found at index `at`, where the original has `expected` and the
            fixed model `actual`.
        psnr: Peak signal-to-noise ratio in dB, the peak being the span of the original's values.
        rms: Root mean square of the original: the scale of `histogram`.
        percentiles: Absolute error that this share (in %) of the elements does not exceed.
        histogram: Elements whose absolute error, in units of `rms`, lies in each decade of
            `statistics.DECADES`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    sample: int
    build: int
    not_finite: int
    relative_l2: float
    max_abs: float
    at: tuple[int, ...]
    expected: float
    actual: float
    cosine: float
    psnr: float
    rms: float
    percentiles: Mapping[str, float]
    histogram: tuple[int, ...]


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
