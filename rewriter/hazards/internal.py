"""Hazard rules about values inside one operator, which no measured tensor shows.

Which operators compute them in the lower type was measured: docs/hazards.md#sums-inside-an-operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from onnx import NodeProto

from rewriter.hazards.kinds import Hazard, Severity
from rewriter.hazards.magnitude import FP16_FLUSH, FP16_MIN_NORMAL
from rewriter.hazards.survey import Survey
from rewriter.ir.graph import attribute
from rewriter.ir.graph.ops import SOFTMAX

NAIVE_LOG_SUM_EXP = "https://github.com/NVIDIA/TensorRT/issues/4772"


def hidden_sums(survey: Survey) -> Iterator[Hazard]:
    """Operators that keep a sum of exponentials or squares in the lower type.

    Emulation rounds tensors only, so it does not show this.
    """
    stable = survey.request.target.answers.get("reduce-log-sum-exp") == "right"
    for node in survey.nodes:
        if stable and node.op_type == "ReduceLogSumExp":
            continue
        bounds = _sum_bounds(survey, node)
        severity = _severity(survey, *bounds) if bounds else None
        if bounds and severity:
            reason = f"the sum inside {node.op_type} lies between {bounds[1]:.2g} and {bounds[2]:.2g}"
            link = NAIVE_LOG_SUM_EXP if node.op_type == "ReduceLogSumExp" else ""
            tensor = node.input[0]
            yield Hazard(node, "internal-overflow", reason, tensor, survey.range(tensor), severity, link=link)


NORM_OPERATORS = {
    "LayerNormalization": "layer-normalization",
    "InstanceNormalization": "instance-normalization",
    "GroupNormalization": "group-normalization",
    "RMSNormalization": "rms-normalization",
}
"""Operators that compute in FP32 inside unless the probe of this name finds otherwise."""


def norm_operators(survey: Survey) -> Iterator[Hazard]:
    """Normalisations that lose accuracy in FP16 on this target, as `rewriter probe` found."""
    for node in survey.nodes if survey.is_fp16 else ():
        if survey.request.target.answers.get(NORM_OPERATORS.get(node.op_type, "")) == "fp16":
            reason = f"{node.op_type} was measured to lose accuracy in FP16 on this target"
            yield survey.hazard(node, "internal-overflow", reason, node.input[0])


def _sum_bounds(survey: Survey, node: NodeProto) -> tuple[float, float, float] | None:
    """The largest term of a hidden sum, with a lower and an upper bound of the sum; None without a sum.

    The sum is at least its largest term, and at least n times the term of the mean (Jensen's inequality).
    """
    term = _term(node)
    measured = survey.range(node.input[0]) if term else None
    if term is None or measured is None or not measured.finite:
        return None
    count = reduced_count(survey, node) or 1
    largest = term(measured.high if node.op_type == "ReduceLogSumExp" else measured.absmax)
    known = measured.low >= 0 or node.op_type == "LpNormalization"
    mean = count * term(measured.mean_abs) if known else 0.0
    return largest, max(largest, mean), count * largest


def _term(node: NodeProto) -> Callable[[float], float] | None:
    """The term that an operator sums for each element; None for operators without a hidden sum."""
    if node.op_type == "ReduceLogSumExp":
        return lambda x: math.exp(min(x, 700.0))
    if node.op_type == "LpNormalization" and attribute(node, "p", 2) == 2:
        return lambda x: x * x
    return (lambda x: x) if node.op_type == "ReduceLogSum" else None


def _severity(survey: Survey, term: float, least: float, most: float) -> Severity | None:
    """Error if the sum overflows or its largest term becomes zero, warning if that is near."""
    small = survey.is_fp16 and term < FP16_MIN_NORMAL
    if least > survey.largest or (small and 0 < term <= FP16_FLUSH):
        return "error"
    return "warning" if most > survey.limit or (small and term > 0) else None


def long_softmax(survey: Survey) -> Iterator[Hazard]:
    """Softmax over more entries than FP16 can count: equal scores sum exp(0) to more than 65504.

    Seen in https://github.com/tier4/autoware-ml/pull/95
    """
    for node in survey.nodes:
        shape = survey.graph.shape(node.input[0]) if node.op_type in SOFTMAX else None
        axis = attribute(node, "axis", -1 if survey.opsets.get("", 13) >= 13 else 1)
        size = shape[axis] if shape and -len(shape) <= axis < len(shape) else None
        if isinstance(size, int) and size > survey.largest:
            reason = f"{node.op_type} over {size} entries may sum up to {size} inside"
            yield survey.hazard(node, "internal-overflow", reason, node.input[0])


def long_sums(survey: Survey) -> Iterator[Hazard]:
    """Means and sums whose sum overflows although the result does not: HAT's ReduceMean gave NaN so.

    TensorRT-RTX 1.6.1 sums them in FP32 (measured); an FP16 model on other runtimes does not:
    https://github.com/microsoft/onnxconverter-common/issues/299
    """
    for node in survey.nodes if survey.is_fp16 else ():
        measured = survey.range(node.input[0]) if node.op_type in _SUMS else None
        number = reduced_count(survey, node) if measured is not None and measured.finite else None
        if measured is None or number is None:
            continue
        result, total = survey.range(node.output[0]), number * measured.mean_abs
        if total > survey.largest and (result is None or result.absmax <= survey.limit):
            what = f"{node.op_type} sums {number} values, about {total:.2g}, inside"
            reason = f"{what}: TensorRT-RTX 1.6.1 was measured to do this in FP32; other releases may not"
            yield survey.hazard(node, "internal-overflow", reason, node.input[0], "note")


_SUMS = frozenset({"ReduceMean", "ReduceSum", "ReduceL1", "GlobalAveragePool"})


def reduced_count(survey: Survey, node: NodeProto) -> int | None:
    """The number of elements that a reduction combines into one; None if a shape is not fully known."""
    given, result = (_static_shape(survey, tensor) for tensor in (node.input[0], node.output[0]))
    if given is not None and node.op_type == "LpNormalization":
        return given[int(attribute(node, "axis", -1))]
    return math.prod(given) // max(1, math.prod(result)) if given is not None and result is not None else None


def _static_shape(survey: Survey, tensor: str) -> list[int] | None:
    shape = survey.graph.shape(tensor)
    sizes = [d for d in shape or () if isinstance(d, int)]
    return sizes if shape is not None and len(sizes) == len(shape) else None
