"""What an output is held to, by what the fixed model computes in; every figure with its source."""

from __future__ import annotations

from dataclasses import dataclass

from onnx import TensorProto

from rewriter.model.facts import Facts

EMULATION_TOLERANCE = {"fp16": 5e-3, "bf16": 4e-2, "fp32": 5e-3}
"""Relative L2 error per output. FP16: well-conditioned networks reach 6e-4 to 2.4e-3 on real engines
(measured on one H200); BF16 has 8 bits of significand where FP16 has 11, so 8 times as much. FP32 is
TF32 here, which has 11."""


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


FP32 = 1e-4
"""Relative L2 error of FP32 arithmetic in another order: 3.8e-6 was measured for single MatMul and Conv
(H200, TF32 off); depth and cancellation get a factor of 25."""

SOURCES = {
    "fp32": "FP32 arithmetic in another order: 3.8e-6 for one MatMul on an H200, times 25 for depth",
    "tf32": "TF32 keeps as many bits as FP16; whole networks measured up to 1.9e-3 on an H200",
    "fp16": "sound FP16 networks measured 6e-4 to 2.4e-3 on an H200, times 2",
    "bf16": "the FP16 tolerance times 8: BF16 has 8 bits of significand where FP16 has 11",
}


def precision_of(facts: Facts) -> str:
    """`bf16`, `fp16` or `fp32`: the coarsest type of a model's tensors."""
    types = {tensor.dtype for scope in facts.scopes for tensor in scope.values()}
    if TensorProto.BFLOAT16 in types:
        return "bf16"
    return "fp16" if TensorProto.FLOAT16 in types else "fp32"


def default_tolerance(facts: Facts, *, tf32: bool) -> Tolerance:
    """The largest relative L2 error that a sound model of these types has.

    Args:
        tf32: Whether what computes may round FP32 to TF32.
    """
    precision = precision_of(facts)
    if precision == "fp32":
        precision = "tf32" if tf32 else "fp32"
    value = {**EMULATION_TOLERANCE, "tf32": EMULATION_TOLERANCE["fp16"], "fp32": FP32}[precision]
    return Tolerance(value, "relative-l2", SOURCES[precision])
