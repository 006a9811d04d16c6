"""Keeps multiplications by constants that FP16 rounds in FP32, where that costs nothing.

A rounded constant is a bias: it scales every value by the same wrong factor, and adds up over layers where
rounding noise averages out. TensorRT divides by a constant as a product with its reciprocal, which it
rounds to FP16: 1/6 is off by 2.35e-4, and ten HardSwishes in a chain shrink everything by 2.4e-3. With the
node in FP32 between two Casts, its kernel is the same (docs/accuracy.md#rounded-constants).
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto, TensorProto

from rewriter.graph.match import with_scalar
from rewriter.hazards.kinds import Hazard
from rewriter.hazards.survey import Survey
from rewriter.planning.free_fp32 import ROUNDED_RULE, scores_of_attention

LEAST_BIAS = 2.0**-14
"""Relative error of a constant that is worth a Cast, a quarter of one rounding: the census of operators on
an H200 shows a slope from there on (docs/accuracy.md#rounded-constants)."""


def extend_over_rounded_constants(survey: Survey, found: dict[int, Hazard]) -> None:
    """Add to `found` the Mul and Div nodes whose scalar FP16 rounds.

    The scaling of attention's scores is skipped: FP32 there takes the fused kernel apart. So is a result that
    nothing but the graph's output reads: TensorRT divides exactly there.
    """
    if survey.request.low != TensorProto.FLOAT16:
        return
    scores = scores_of_attention(survey)
    for node in survey.nodes:
        if id(node) in found or id(node) in scores or node.op_type not in ("Mul", "Div"):
            continue
        factor = multiplied_by(survey, node)
        if factor is None or bias_in_fp16(factor) < LEAST_BIAS or not list(survey.readers(node.output[0])):
            continue
        reason = f"FP16 rounds its factor {factor:.6g} by {bias_in_fp16(factor):.1e}, in FP32 at no cost"
        found[id(node)] = Hazard(node, ROUNDED_RULE, reason, node.input[0])


def multiplied_by(survey: Survey, node: NodeProto) -> float | None:
    """The scalar that a Mul or Div multiplies its other operand by; None if there is none."""
    operands = with_scalar(survey.graph, node)
    if operands is None or (node.op_type == "Div" and operands[0] != node.input[0]):
        return None
    value = operands[1]
    if not np.isfinite(value) or value == 0.0:
        return None
    return 1.0 / value if node.op_type == "Div" else value


def bias_in_fp16(factor: float) -> float:
    """Relative error of a factor that is rounded to FP16; 0.0 where FP16 has no such number."""
    with np.errstate(over="ignore"):
        rounded = float(np.float16(factor))
    return abs(rounded / factor - 1.0) if np.isfinite(rounded) and rounded else 0.0
