"""The result of `verify`, as plain data."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rewriter.base.text import Row, Summary, figure, listed
from rewriter.runtime.engines.protocol import Latency
from rewriter.runtime.inputs.samples import DataSource
from rewriter.runtime.metrics.outputs import OutputStatistics
from rewriter.runtime.metrics.tolerances import Tolerance
from rewriter.verification.compare_runs import BuildRun
from rewriter.verification.verdict import UNBUILDABLE, Check, Gap, Verdict, gain, gaps, not_lowered, proof


@dataclass(frozen=True, repr=False)
class VerifyResult(Summary):
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

    @property
    def ending(self) -> str:
        """How it ended, in the words of the report's first line."""
        if self.verdict.unbuildable is not None:
            return UNBUILDABLE
        if not self.passed:
            failed = ", ".join(check.name for check in self.checks if check.passed is False)
            return f"VERIFICATION FAILED ({failed or 'nothing ran'})"
        how = proof(self.checks, self.data.samples, self.data, self.gaps)
        if not self.lowered:
            return not_lowered(how, floats=self.floats)
        return ", ".join(filter(None, (how, self.gain)))

    @property
    def gain(self) -> str:
        """Its speed beside the original's FP32 engine, in the first line's words; "" if it was not timed."""
        if self.latency is None or self.reference_latency is None:
            return ""
        return gain(self.latency.median_us / self.reference_latency.median_us, "FP32 without TF32")

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """Reasons why checks that passed are no proof; () if one failed."""
        if not self.passed:
            return ()
        return gaps(self.checks, self.data, "`build=false`", self.worse, all_fp32=self.all_fp32)

    @property
    def proven(self) -> bool:
        """True if the checks passed, and lack nothing."""
        return self.passed and not self.gaps

    def summary(self) -> Iterator[Row]:
        yield "verdict", self.ending
        yield "engine", f"{self.engine} on {self.device}"
        yield from self.verdict.rows()
        errors = (f"{o.name}: relative L2 {figure(o.relative_l2)}" for o in self.outputs)
        yield from listed("outputs", errors, 3)
        if self.latency is not None:
            yield "latency", f"{self.latency.median_us:.1f} us"
        yield "data", self.data.text
