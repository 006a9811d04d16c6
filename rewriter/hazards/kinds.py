"""A hazard, and the kinds of hazard: title, default severity, and the cheapest repair."""

from __future__ import annotations

from dataclasses import dataclass

from onnx import NodeProto

from rewriter.base.errors import SEVERITIES, Severity
from rewriter.ir.plan import NormHazard, Range
from rewriter.ir.reading import own_table


@dataclass(frozen=True)
class Kind:
    """One kind of hazard, as reports explain it; the head of `kinds.toml` explains the fields."""

    title: str
    severity: Severity
    repair: str
    why: str
    picture: str
    measured: bool = False
    acts: Severity = "note"


@dataclass(frozen=True)
class Hazard:
    """A node that goes wrong in the lower precision, with the evidence.

    Attributes:
        kind: A key of `KINDS` where `scan` reports it.
        reason: One sentence; hazards with the same kind and reason are one finding.
        severity, repair: None: as in the kind.
        link: The page that reports it, if there is one.
        norm: For a node of a decomposed norm.
        about: Name of the node that goes wrong, if `node` feeds it; "" for `node` itself.
    """

    node: NodeProto
    kind: str
    reason: str
    tensor: str | None = None
    range: Range | None = None
    severity: Severity | None = None
    repair: str | None = None
    link: str = ""
    norm: NormHazard | None = None
    about: str = ""

    @property
    def acted_on(self) -> bool:
        """True if `fix` keeps the node in FP32 for it."""
        kind = KINDS.get(self.kind)
        severity = self.severity or (kind.severity if kind else "error")
        return kind is None or SEVERITIES.index(severity) >= SEVERITIES.index(kind.acts)


KINDS = {name: Kind(**row) for name, row in own_table("rewriter.hazards", "kinds.toml").items()}
"""By the `kind` of a hazard: the table `kinds.toml`."""
