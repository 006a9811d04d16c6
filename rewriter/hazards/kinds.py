"""A hazard, and the kinds of hazard: title, default severity, and the cheapest repair.

Repairs form a ladder, cheapest rung first: nothing; an operator that computes in FP32 inside; equal
algebra; exact rescaling by powers of two; FP32 accumulation or a BF16 island; an FP32 island. The rungs
`data` and `build` stand for hazards that no rewriting of the graph repairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from onnx import NodeProto

from rewriter.ir.plan import NormHazard, Range

Severity = Literal["note", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("note", "warning", "error")
"""Note: worth knowing. Warning: inaccurate, or wrong on other data. Error: wrong on these samples."""

Rung = Literal[
    "nothing", "fp32-inside", "equal-algebra", "rescale", "accumulate-fp32", "fp32-island", "data", "build"
]


@dataclass(frozen=True)
class Kind:
    """One kind of hazard, as reports explain it.

    Attributes:
        title: Its name in reports, without an article.
        severity: Used where the rule itself gives none.
        rung: The cheapest repair.
        repair: The same for the user, in one sentence.
        measured: True if its evidence is a measured range, which may be wrong on random data.
    """

    title: str
    severity: Severity
    rung: Rung
    repair: str
    measured: bool = False


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


_ISLAND = "keep these nodes in FP32: `rewriter fix` does"

KINDS: dict[str, Kind] = {
    "overflow": Kind(
        "tensor outside the lower type's range",
        "error",
        "fp32-island",
        f"{_ISLAND}, or rescales exactly",
        True,
    ),
    "unfused-norm": Kind(
        "decomposed normalisation",
        "note",
        "fp32-inside",
        "make it one operator (pass fuse-layer-norm), or keep it whole in FP32",
    ),
    "internal-overflow": Kind(
        "overflow inside one operator",
        "warning",
        "fp32-island",
        "keep the operator in FP32: `rewriter fix` does where it was measured to be wrong in FP16",
        True,
    ),
    "partial-sums": Kind(
        "partial sums of a product outside the accumulator's range",
        "warning",
        "accumulate-fp32",
        "accumulate in FP32: a Cast to FP32 before the operator and back after it; `rewriter fix` does "
        "where that is likely",
        True,
    ),
    "accumulator-error": Kind(
        "rounding error of a long FP16 accumulation",
        "note",
        "accumulate-fp32",
        "accumulate in FP32 where the output's error matters (`keep-fp32`)",
    ),
    "accumulation": Kind("rounding that adds up from step to step", "note", "fp32-island", _ISLAND),
    "underflow": Kind(
        "tensor below the lower type's normal range", "warning", "rescale", f"rescale it, or {_ISLAND}", True
    ),
    "flushed-constant": Kind(
        "constant that becomes zero or loses bits",
        "warning",
        "equal-algebra",
        "rescale it, or keep its node in FP32",
    ),
    "weights": Kind(
        "constant outside the lower type's range",
        "error",
        "rescale",
        "rescale it by a power of two, or keep its node in FP32: `rewriter fix` does on overflow",
    ),
    "epsilon": Kind("epsilon that FP16 loses", "warning", "fp32-island", _ISLAND),
    "small-operand": Kind(
        "small operand of a logarithm, root or division", "warning", "fp32-island", _ISLAND, True
    ),
    "steep-function": Kind(
        "logarithm, root or quotient of what FP16 does not resolve", "warning", "fp32-island", _ISLAND, True
    ),
    "mask": Kind(
        "mask constant that becomes infinite",
        "warning",
        "equal-algebra",
        "bring the constant into range (pass clamp-constants)",
    ),
    "logits": Kind(
        "Softmax of scores that FP16 holds in large steps",
        "note",
        "fp32-island",
        "compute Softmax in FP32: the preset `accurate` does; TF32 rounds what is multiplied "
        "alike, so only FP32 without TF32 is exact",
        True,
    ),
    "positions": Kind("integers carried as floats", "warning", "fp32-island", _ISLAND),
    "phase": Kind("large angle of Sin or Cos", "warning", "fp32-island", _ISLAND, True),
    "integers": Kind("floats that become integers", "note", "fp32-island", _ISLAND),
    "coordinates": Kind("sampling coordinates", "warning", "fp32-island", f"{_ISLAND}, at no cost"),
    "order": Kind("order of nearly equal values", "warning", "fp32-island", f"{_ISLAND}; compare as sets"),
    "cancellation": Kind(
        "difference of nearly equal numbers",
        "warning",
        "fp32-island",
        f"{_ISLAND}; or subtract earlier",
        True,
    ),
    "linear-attention": Kind(
        "linear attention without normalisation",
        "warning",
        "rescale",
        "divide keys by the number of tokens before the product, or keep it in FP32 (`keep-fp32`)",
    ),
    "quantized": Kind("scale of Q/DQ below FP16's normal range", "note", "fp32-island", _ISLAND),
    "cast-pair": Kind(
        "rounding in the middle of FP32",
        "note",
        "nothing",
        "if it is left over from a converter, begin with the FP32 model; `rewriter fix` keeps what it does",
        True,
    ),
    "wide-integer": Kind(
        "integer beyond 32 bits", "note", "build", "use TensorRT 9 or later, or a constant that fits INT32"
    ),
    "tf32": Kind(
        "products that TF32 rounds",
        "note",
        "build",
        "compare with an engine without TF32 (--noTF32, or NVIDIA_TF32_OVERRIDE=0): slower, and exact",
        True,
    ),
    "known-defect": Kind("known defect of TensorRT", "note", "build", "see the link"),
    "refused-operator": Kind(
        "operator that the target's parser refuses",
        "error",
        "build",
        "name another release, or bring a plugin",
    ),
    "unmeasured": Kind("tensor without a measured range", "warning", "data", "give samples that reach it"),
    "no-schema": Kind("operator without an ONNX schema", "note", "fp32-island", _ISLAND),
    "outside-statistics": Kind(
        "data far from what the model was trained on", "warning", "data", "check the preprocessing", True
    ),
    "random-data": Kind(
        "ranges of random inputs",
        "note",
        "data",
        "measure on real data (`inputs`): random inputs give false alarms and miss real overflows",
    ),
    "training": Kind("kept in FP32 by training", "note", "fp32-island", _ISLAND),
    "user-rule": Kind("found by a rule of your own", "warning", "fp32-island", _ISLAND),
    "fp16-reference": Kind(
        "FP16 model as the reference",
        "note",
        "data",
        "compare engines with the FP32 original: ONNX Runtime's CPU kernels compute FP16 graphs in FP32",
    ),
}
"""By the `rule` of a hazard."""
