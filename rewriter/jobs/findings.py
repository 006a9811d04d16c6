"""The result of `scan`: hazards as plain data, for the terminal, JSON, SARIF and callers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rewriter.base.errors import SEVERITIES, Severity
from rewriter.base.summary import Row, Summary, listed
from rewriter.base.text import count
from rewriter.ir.plan import Precision, Range
from rewriter.runtime.inputs.samples import DataSource
from rewriter.target import Target
from rewriter.verification.verdict import Check


@dataclass(frozen=True)
class Finding:
    """One hazard, with all the nodes that it concerns, in graph order, and their operators.

    `kind` is a key of `kinds.KINDS`. `tensor` and `range` are the evidence, where one tensor is; `link` is
    the page that a known defect is reported on.
    """

    kind: str
    severity: Severity
    reason: str
    repair: str
    nodes: tuple[str, ...]
    ops: tuple[str, ...]
    tensor: str | None = None
    range: Range | None = None
    link: str = ""


@dataclass(frozen=True, repr=False)
class ScanResult(Summary):
    """The outcome of `scan`.

    Attributes:
        path: The model's file; None if it was given as an object.
        findings: Errors first, then warnings, then notes; in the order of the rules within each.
        float_nodes: How many nodes compute on floating-point tensors.
        plain: The emulation of MODEL as it is in that precision, on the samples that `fix` judges by; None on
            random data.
        warnings: Sentences about the scan itself that the user should read.
        seconds: Wall time by stage, in order.
    """

    path: Path | None
    precision: Precision
    target: Target
    findings: tuple[Finding, ...]
    data: DataSource
    float_nodes: int
    plain: Check | None = None
    warnings: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)

    def count(self, severity: Severity) -> int:
        """The number of findings of that severity."""
        return sum(f.severity == severity for f in self.findings)

    def reaches(self, severity: Severity) -> bool:
        """True if a finding is at least that severe."""
        return any(SEVERITIES.index(f.severity) >= SEVERITIES.index(severity) for f in self.findings)

    def summary(self) -> Iterator[Row]:
        counts = ", ".join(count(self.count(severity), severity) for severity in reversed(SEVERITIES))
        yield "found", f"{counts} in {count(self.float_nodes, 'float node')}, for {self.precision.upper()}"
        for severity in reversed(SEVERITIES[1:]):
            lines = (
                f"{count(len(f.nodes), 'node')}: {f.reason}" for f in self.findings if f.severity == severity
            )
            yield from listed(f"{severity}s", lines, 3)
        yield "data", self.data.text
