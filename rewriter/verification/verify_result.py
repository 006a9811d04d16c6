"""The outcome of `verify`, as plain data; `report/` has the sentences."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rewriter.runtime.engines.protocol import Latency
from rewriter.runtime.inputs.samples import DataSource
from rewriter.runtime.metrics.outputs import OutputStatistics
from rewriter.runtime.metrics.tolerances import Tolerance
from rewriter.verification.compare_runs import BuildRun
from rewriter.verification.verdict import Check, Verdict


@dataclass(frozen=True, repr=False)
class VerifyOutcome:
    """The outcome of `verify`.

    Attributes:
        engine: Library and version, or `emulation`. `device`: the GPU, or `CPU`.
        outputs: The worst sample and build of each output, in the order of the model's outputs.
        latency: Of the fixed model's first build; `reference_latency`: of the original in FP32, without
            TF32. None if not timed.
        verdict: The checks: `reference`, `run` or `emulation`, `build`.
        warnings: Sentences for the user; the first one reports if no GPU was used.
        lowered: True if something of the fixed model is in reduced precision. `floats`: if it has floats.
            `all_fp32`: if nothing is, though it has floats and does not note that FP32 was the request.
        worse: The outputs on which plain FP16 is more accurate, as `fix` noted them in the file.
        seconds: Wall time by stage, in order.
    """

    original: Path | None
    fixed: Path | None
    engine: str
    device: str
    tolerance: Tolerance
    data: DataSource
    outputs: tuple[OutputStatistics, ...] = ()
    builds: tuple[BuildRun, ...] = ()
    latency: Latency | None = None
    reference_latency: Latency | None = None
    verdict: Verdict = field(default_factory=lambda: Verdict(()))
    warnings: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    worse: str = ""
    lowered: bool = True
    floats: bool = True
    all_fp32: bool = False

    @property
    def passed(self) -> bool:
        """True if at least one check was made and none failed."""
        return self.verdict.passed

    @property
    def checks(self) -> tuple[Check, ...]:
        return self.verdict.checks
