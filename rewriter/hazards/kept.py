"""Hazards that a mixed-precision model already avoids by computing in FP32."""

from __future__ import annotations

from rewriter.hazards.analysis import GraphAnalysis
from rewriter.hazards.kinds import Hazard

ANY_TYPE = frozenset(
    "cast-pair tf32 known-defect refused-operator unmeasured no-schema random-data fp16-reference "
    "quantized".split()
)
"""Kinds that occur in FP32, too, or that concern no arithmetic."""

OF_RESULTS = frozenset({"overflow", "underflow"})
"""Kinds that hold wherever a Cast to the lower type follows, whatever type the node computes in."""

OF_OPERANDS = frozenset("coordinates order positions phase integers cancellation".split())
"""Kinds that FP32 does not repair where the operands were rounded before."""

ALREADY_AVOIDED = "nothing to do: this model computes it in FP32; keep it so"


def is_already_avoided(analysis: GraphAnalysis, hazard: Hazard) -> bool:
    """True if the model, mixed already, computes the hazard's node in FP32 and keeps the benefit.

    A Cast of the result to the lower type must not overflow.
    """
    node = hazard.node
    # a Cast between float types is judged by its result
    cast = node.op_type == "Cast" and all(analysis.is_float(t) for t in (*node.input, *node.output))
    if not analysis.mixed or hazard.kind in ANY_TYPE or not (cast or analysis.in_fp32(node)):
        return False
    if hazard.kind in OF_OPERANDS:
        return not any(analysis.was_rounded(t) for t in node.input if analysis.is_float(t))
    rounded = [t for t in node.output if analysis.is_float(t) and analysis.lowered(t)]
    if hazard.kind in OF_RESULTS:
        return not rounded
    measured = [analysis.range(t) for t in rounded]
    return all(m is None or m.absmax <= analysis.largest for m in measured)
