"""Hazard rules about values inside one operator, by measurement: docs/hazards.md#sums-inside-an-operator."""

import math
from collections.abc import Callable, Iterator, Mapping

from onnx import NodeProto

from rewriter.base.errors import Severity
from rewriter.hazards.analysis import GraphAnalysis, Hazard
from rewriter.hazards.magnitude import FP16_FLUSH, FP16_MIN_NORMAL
from rewriter.ir.graph import attribute
from rewriter.ir.graph.ops import SOFTMAX

NAIVE_LOG_SUM_EXP = "https://github.com/NVIDIA/TensorRT/issues/4772"

TERMS: Mapping[str, Callable[[float], float]] = {
    "ReduceLogSumExp": lambda x: math.exp(min(x, 700.0)),
    "ReduceLogSum": lambda x: x,
    "LpNormalization": lambda x: x * x,
}
"""Operators with a hidden sum, each with the term that an element adds to it."""


def hidden_sums(analysis: GraphAnalysis) -> Iterator[Hazard]:
    """Operators that keep a sum of exponentials or squares in the lower type.

    Emulation rounds tensors only, so it does not show this. The sum is at least its largest term, and at
    least n times the term of the mean (Jensen's inequality). An error if that overflows or the largest term
    becomes zero, a warning if it is near.
    """
    stable = analysis.request.target.answers.get("reduce-log-sum-exp") == "right"
    for node in analysis.nodes:
        term = TERMS.get(node.op_type)
        measured = analysis.range(node.input[0]) if term else None
        if term is None or measured is None or not measured.finite or attribute(node, "p", 2) != 2:
            continue
        exponential = node.op_type == "ReduceLogSumExp"
        if exponential and stable:
            continue
        number = reduced_count(analysis, node) or 1
        largest = term(measured.high if exponential else measured.absmax)
        same_sign = measured.low >= 0 or node.op_type == "LpNormalization"
        least = max(largest, number * term(measured.mean_abs) if same_sign else 0.0)
        small = analysis.is_fp16 and 0 < largest < FP16_MIN_NORMAL
        if least > analysis.largest or (small and largest <= FP16_FLUSH):
            severity: Severity = "error"
        elif number * largest > analysis.limit or small:
            severity = "warning"
        else:
            continue
        reason = f"the sum inside {node.op_type} lies between {least:.2g} and {number * largest:.2g}"
        link = NAIVE_LOG_SUM_EXP if exponential else ""
        tensor = node.input[0]
        yield Hazard(node, "internal-overflow", reason, tensor, measured, severity, link=link)


NORM_OPERATORS = {
    "LayerNormalization": "layer-normalization",
    "InstanceNormalization": "instance-normalization",
    "GroupNormalization": "group-normalization",
    "RMSNormalization": "rms-normalization",
}
"""Operators that compute in FP32 inside unless the probe of this name finds otherwise."""


def norm_operators(analysis: GraphAnalysis) -> Iterator[Hazard]:
    """Normalisations that lose accuracy in FP16 on this target, as `rewriter probe` found."""
    for node in analysis.nodes if analysis.is_fp16 else ():
        if analysis.request.target.answers.get(NORM_OPERATORS.get(node.op_type, "")) == "fp16":
            reason = f"{node.op_type} was measured to lose accuracy in FP16 on this target"
            yield analysis.hazard(node, "internal-overflow", reason, node.input[0])


def long_softmax(analysis: GraphAnalysis) -> Iterator[Hazard]:
    """Softmax over more entries than FP16 can count: equal scores sum exp(0) to more than 65504.

    Seen in https://github.com/tier4/autoware-ml/pull/95
    """
    for node in analysis.nodes:
        axis = attribute(node, "axis", -1 if analysis.opsets.get("", 13) >= 13 else 1)
        size = analysis.graph.size(node.input[0], axis) if node.op_type in SOFTMAX else None
        if isinstance(size, int) and size > analysis.largest:
            reason = f"{node.op_type} over {size} entries may sum up to {size} inside"
            yield analysis.hazard(node, "internal-overflow", reason, node.input[0])


def reduced_count(analysis: GraphAnalysis, node: NodeProto) -> int | None:
    """The number of elements that a reduction combines into one; None if a shape is not fully known."""
    sizes, result = analysis.graph.sizes(node.input[0]), analysis.graph.sizes(node.output[0])
    if sizes is not None and node.op_type == "LpNormalization":
        return sizes[int(attribute(node, "axis", -1))]
    return math.prod(sizes) // max(1, math.prod(result)) if sizes is not None and result is not None else None
