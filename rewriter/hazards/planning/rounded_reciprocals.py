"""Keeps divisions by constants whose reciprocal FP16 rounds in FP32, where that costs nothing.

TensorRT divides by a constant as a product with its reciprocal, which it rounds to FP16. The rounding is a
bias: it scales every value by the same wrong factor, and adds up over layers where rounding noise averages
out. 1/6 is off by 2.35e-4, and ten HardSwishes in a chain shrink everything by 2.4e-3. With the Div in FP32
between two Casts the kernel is the same (docs/accuracy.md#rounded-reciprocals). A Mul by a rounded constant
has the same bias; in FP32 it made a text detector worse, so it stays FP16.
"""

from __future__ import annotations

from onnx import TensorProto

from rewriter.hazards.kinds import Hazard
from rewriter.hazards.planning.free_fp32 import RECIPROCAL_RULE, scores_of_attention
from rewriter.hazards.survey import Survey
from rewriter.ir.graph.fusion import rounded_reciprocal

LEAST_BIAS = 2.0**-14
"""Relative error of a reciprocal that is worth a Cast, a quarter of one rounding to FP16: on an H200 a slope
showed from there on (docs/accuracy.md#rounded-reciprocals)."""

BOUNDED = frozenset({"Erf", "Sigmoid", "HardSigmoid", "Tanh", "Softmax"})
"""Functions whose result does not grow with their argument."""


def extend_over_rounded_reciprocals(survey: Survey, found: dict[int, Hazard]) -> None:
    """Add to `found` the divisions by a scalar whose reciprocal FP16 rounds.

    The scaling of attention's scores is skipped: FP32 there takes the fused kernel apart. So is the argument
    of a function that is bounded, as in GELU: a bias of it adds up no further, and FP32 there cost up to 6 %
    of latency. So is a result that nothing but the graph's output reads: TensorRT divides exactly there.
    """
    if survey.request.low != TensorProto.FLOAT16:
        return
    scores = scores_of_attention(survey)
    for node in survey.nodes:
        if node.op_type != "Div" or id(node) in found or id(node) in scores:
            continue
        divisor = survey.scalar(node.input[1])
        bias = reciprocal_bias(divisor) if divisor is not None else 0.0
        readers = {reader.op_type for _, reader in survey.readers(node.output[0])}
        if bias >= LEAST_BIAS and readers - BOUNDED:
            reason = f"FP16 rounds the reciprocal of {divisor:.6g} by {bias:.1e}; FP32 costs nothing"
            found[id(node)] = Hazard(node, RECIPROCAL_RULE, reason, node.input[0])


def reciprocal_bias(divisor: float) -> float:
    """Relative error of 1 / divisor rounded to FP16; 0.0 if FP16 has no such number."""
    factor = rounded_reciprocal(divisor)
    return 0.0 if factor is None else abs(factor * divisor - 1.0)
