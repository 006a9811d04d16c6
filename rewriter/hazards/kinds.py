"""A hazard, and the kinds of hazard: title, default severity, and the cheapest repair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from onnx import NodeProto

from rewriter.ir.plan import NormHazard, Range

Severity = Literal["note", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("note", "warning", "error")
"""Note: worth knowing. Warning: inaccurate, or wrong on other data. Error: wrong on these samples."""


@dataclass(frozen=True)
class Kind:
    """One kind of hazard, as reports explain it.

    Attributes:
        title: Its name in reports, without an article.
        severity: Used where the rule itself gives none.
        repair: The cheapest one, in one sentence for the user.
        measured: True if its evidence is a measured range, which may be wrong on random data.
        acts: The least severity with which `fix` keeps a node in FP32.
    """

    title: str
    severity: Severity
    repair: str
    measured: bool = False
    acts: Severity = "note"


@dataclass(frozen=True)
class Hazard:
    """A node that goes wrong in the lower precision, with the evidence.

    Attributes:
        rule: Its kind: a key of `KINDS` where `scan` reports it.
        reason: One sentence; hazards with the same rule and reason are one finding.
        severity, repair: None: those of the kind.
        link: The page that reports it, if there is one.
        norm: For a node of a decomposed norm.
    """

    node: NodeProto
    rule: str
    reason: str
    tensor: str | None = None
    range: Range | None = None
    severity: Severity | None = None
    repair: str | None = None
    link: str = ""
    norm: NormHazard | None = None

    @property
    def acted_on(self) -> bool:
        """True if `fix` keeps the node in FP32 for it."""
        kind = KINDS.get(self.rule)
        severity = self.severity or (kind.severity if kind else "error")
        return kind is None or SEVERITIES.index(severity) >= SEVERITIES.index(kind.acts)


_ISLAND = "keep these nodes in FP32: `rewriter fix` does"

KINDS: dict[str, Kind] = {
    "overflow": Kind(
        "tensor outside the lower type's range", "error", f"{_ISLAND}, or rescales exactly", True
    ),
    "unfused-norm": Kind(
        "decomposed normalisation",
        "note",
        "make it one operator (pass fuse-layer-norm), or keep it whole in FP32",
    ),
    "internal-overflow": Kind(
        "overflow inside one operator",
        "warning",
        "keep the operator in FP32: `rewriter fix` does where it was measured to be wrong in FP16",
        True,
        "warning",
    ),
    "partial-sums": Kind(
        "partial sums of a product outside the accumulator's range",
        "warning",
        "accumulate in FP32, with a Cast before the operator and after it: `rewriter fix` does",
        True,
    ),
    "accumulation": Kind("rounding that adds up from step to step", "note", _ISLAND),
    "underflow": Kind(
        "tensor below the lower type's normal range", "warning", f"rescale it, or {_ISLAND}", True, "warning"
    ),
    "weights": Kind(
        "constant outside the lower type's range", "error", f"rescale it by a power of two, or {_ISLAND}"
    ),
    "epsilon": Kind("epsilon that FP16 loses", "warning", _ISLAND),
    "small-operand": Kind("small operand of a logarithm, root or division", "warning", _ISLAND, True),
    "steep-function": Kind(
        "logarithm, root or quotient of what FP16 does not resolve", "warning", _ISLAND, True
    ),
    "mask": Kind(
        "mask constant that becomes infinite",
        "warning",
        f"bring the constant into range (pass clamp-constants); {_ISLAND} for factors",
        acts="error",
    ),
    "positions": Kind("integers carried as floats", "warning", _ISLAND),
    "phase": Kind("large angle of Sin or Cos", "warning", _ISLAND, True),
    "integers": Kind("floats that become integers", "note", _ISLAND),
    "coordinates": Kind("sampling coordinates", "warning", f"{_ISLAND}, at no cost"),
    "order": Kind("order of nearly equal values", "warning", f"{_ISLAND}; compare as sets"),
    "cancellation": Kind(
        "difference of nearly equal numbers", "warning", f"{_ISLAND}; or subtract earlier", True
    ),
    "linear-attention": Kind(
        "linear attention without normalisation",
        "warning",
        "divide keys by the number of tokens before the product, or keep it in FP32 (`keep-fp32`)",
    ),
    "quantized": Kind("scale of Q/DQ below FP16's normal range", "note", _ISLAND),
    "cast-pair": Kind(
        "rounding in the middle of FP32",
        "note",
        "if it is left over from a converter, begin with the FP32 model; `rewriter fix` keeps what it does",
        True,
    ),
    "wide-integer": Kind(
        "integer beyond 32 bits", "note", "use TensorRT 9 or later, or a constant that fits INT32"
    ),
    "tf32": Kind(
        "products that TF32 rounds",
        "note",
        "compare with an engine without TF32 (--noTF32, or NVIDIA_TF32_OVERRIDE=0): slower, and exact",
        True,
    ),
    "known-defect": Kind("known defect of TensorRT", "note", "see the link"),
    "refused-operator": Kind(
        "operator that the target's parser refuses", "error", "name another release, or bring a plugin"
    ),
    "unmeasured": Kind("tensor without a measured range", "warning", "give samples that reach it"),
    "no-schema": Kind("operator without an ONNX schema", "note", _ISLAND),
    "outside-statistics": Kind(
        "data far from what the model was trained on", "warning", "check the preprocessing", True
    ),
    "random-data": Kind(
        "ranges of random inputs",
        "note",
        "measure on real data (`inputs`): random inputs give false alarms and miss real overflows",
    ),
    "user-rule": Kind("found by a rule of your own", "warning", _ISLAND),
    "fp16-reference": Kind(
        "FP16 model as the reference",
        "note",
        "compare engines with the FP32 original: ONNX Runtime's CPU kernels compute FP16 graphs in FP32",
    ),
}
"""By the `rule` of a hazard."""
