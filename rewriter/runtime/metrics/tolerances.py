"""Tolerances by the precision that a model computes in, each with its source."""

from dataclasses import dataclass

from onnx import TensorProto

from rewriter.ir.model import Model

RELATIVE_L2 = "relative-l2"  # the default metric

USABLE = 0.1
"""Largest relative L2 error that another figure, or the network's own FP32 engine, excuses: beyond it the
result is of no use, whatever it is compared with."""


@dataclass(frozen=True)
class Tolerance:
    """A limit on the errors of a model's outputs, by a metric of `metrics.METRICS`, and its source."""

    value: float
    metric: str
    source: str


TOLERANCES = {
    "fp32": Tolerance(
        1e-4,
        RELATIVE_L2,
        "FP32 arithmetic in another order: 3.8e-6 for one MatMul on an H200, times 25 for depth",
    ),
    "tf32": Tolerance(
        5e-3, RELATIVE_L2, "TF32 keeps as many bits as FP16; whole networks measured up to 1.9e-3 on an H200"
    ),
    "fp16": Tolerance(5e-3, RELATIVE_L2, "sound FP16 networks measured 6e-4 to 2.4e-3 on an H200, times 2"),
    "bf16": Tolerance(
        4e-2, RELATIVE_L2, "the FP16 tolerance times 8: BF16 has 8 bits of significand where FP16 has 11"
    ),
}
"""Largest error of a sound model, by the precision of its arithmetic."""


def precision_of(model: Model) -> str:
    """`bf16`, `fp16` or `fp32`: the coarsest type of a model's tensors."""
    types = {tensor.dtype for scope in model.facts().scopes for tensor in scope.values()}
    if TensorProto.BFLOAT16 in types:
        return "bf16"
    return "fp16" if TensorProto.FLOAT16 in types else "fp32"
