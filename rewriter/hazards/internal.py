"""Hazard rules about what one operator computes inside, which no measured tensor shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from onnx import NodeProto, TensorProto

from rewriter.graph import attribute
from rewriter.hazards.kinds import Severity
from rewriter.hazards.magnitude import FP16_FLUSH, FP16_MIN_NORMAL
from rewriter.hazards.survey import Hazard, Survey

NAIVE_LOG_SUM_EXP = "https://github.com/NVIDIA/TensorRT/issues/4772"

_ELSEWHERE = "TensorRT-RTX 1.6.1 was measured to do this in FP32; other releases may not"


def hidden_sums(survey: Survey) -> Iterator[Hazard]:
    """Operators that hold a sum of exponentials or squares in the lower type, though no tensor shows it.

    Measured on an H200, TensorRT-RTX 1.6.1, FP16; FP32 round the operator alone repaired the first two:
    ReduceLogSumExp of 256 times 5.4 is right, of 5.6 infinite (256 exp(5.6) > 65504), of -20 -infinite;
    LpNormalization of 64 times 31 is right, of 33 zero (64 * 33^2 > 65504), of 1e-4 wrong; ReduceLogSum
    of 256 times 3000 is infinite. Emulation, which rounds tensors, does not see it.
    """
    stable = survey.request.target.answers.get("reduce-log-sum-exp") == "right"
    for node in survey.nodes:
        if stable and node.op_type == "ReduceLogSumExp":
            continue
        terms = _terms(survey, node)
        severity = _severity(survey, *terms) if terms else None
        if terms and severity:
            reason = f"the sum inside {node.op_type} lies between {terms[1]:.2g} and {terms[2]:.2g}"
            link = NAIVE_LOG_SUM_EXP if node.op_type == "ReduceLogSumExp" else ""
            tensor = node.input[0]
            yield Hazard(node, "internal-overflow", reason, tensor, survey.range(tensor), severity, link=link)


NORM_OPERATORS = {
    "LayerNormalization": "layer-normalization",
    "InstanceNormalization": "instance-normalization",
    "GroupNormalization": "group-normalization",
    "RMSNormalization": "rms-normalization",
}
"""Operators that are taken to compute in FP32 inside, with the probes that ask for it."""


def norm_operators(survey: Survey) -> Iterator[Hazard]:
    """Normalisations that `rewriter probe` saw lose accuracy in FP16 on this target."""
    for node in survey.nodes if survey.request.low == TensorProto.FLOAT16 else ():
        if survey.request.target.answers.get(NORM_OPERATORS.get(node.op_type, "")) == "fp16":
            reason = f"{node.op_type} was measured to lose accuracy in FP16 on this target"
            yield Hazard(node, "internal-overflow", reason, node.input[0], survey.range(node.input[0]))


def _terms(survey: Survey, node: NodeProto) -> tuple[float, float, float] | None:
    """The largest term of a hidden sum, and a lower and an upper bound of the sum; None without one.

    Below, the sum is at least its largest term, and n times the term of the mean (Jensen's inequality).
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
    """What an operator sums of each element; None for those whose sums are right in any type."""
    if node.op_type == "ReduceLogSumExp":
        return lambda x: math.exp(min(x, 700.0))
    if node.op_type == "LpNormalization" and attribute(node, "p", 2) == 2:
        return lambda x: x * x
    return (lambda x: x) if node.op_type == "ReduceLogSum" else None


def _severity(survey: Survey, term: float, least: float, most: float) -> Severity | None:
    """Error if the sum is out of range or its largest term is zero, warning if that is near."""
    small = survey.request.low == TensorProto.FLOAT16 and term < FP16_MIN_NORMAL
    if least > survey.request.largest or (small and 0 < term <= FP16_FLUSH):
        return "error"
    return "warning" if most > survey.request.limit or (small and term > 0) else None


def long_softmax(survey: Survey) -> Iterator[Hazard]:
    """A Softmax over more entries than FP16 can count: equal scores sum exp(0) to more than 65504.

    Measured on an H200, TensorRT-RTX 1.6.1: over 65,500 equal scores right, over 65,536 zero; FP32 round
    the operator repairs it. Seen in https://github.com/tier4/autoware-ml/pull/95
    """
    for node in survey.nodes:
        shape = survey.graph.shape(node.input[0]) if node.op_type in {"Softmax", "LogSoftmax"} else None
        axis = attribute(node, "axis", -1 if survey.opsets.get("", 13) >= 13 else 1)
        size = shape[axis] if shape and -len(shape) <= axis < len(shape) else None
        if isinstance(size, int) and size > survey.request.largest:
            reason = f"{node.op_type} over {size} entries may sum up to {size} inside"
            yield Hazard(node, "internal-overflow", reason, node.input[0], survey.range(node.input[0]))


def inner_squares(survey: Survey) -> Iterator[Hazard]:
    """ReduceL2 squares inside: the sum of squares leaves the range long before its root does.

    At least absmax^2, and n * mean(|x|)^2 by Jensen's inequality, is the sum of n squares.
    ReduceSumSquare has its sum as a tensor: `overflow` sees that.
    """
    for node in survey.nodes:
        measured = survey.range(node.input[0]) if node.op_type == "ReduceL2" else None
        if measured is None or not measured.finite:
            continue
        count = reduced_count(survey, node) or 1
        total = max(measured.absmax**2, count * measured.mean_abs**2)
        if total > survey.request.largest:
            text = f"{node.op_type} sums squares up to at least {total:.2g} inside: {_ELSEWHERE}"
            yield Hazard(node, "internal-overflow", text, node.input[0], measured, "note")


def inner_exponentials(survey: Survey) -> Iterator[Hazard]:
    """Softplus and Mish, whose naive form takes exp(x): infinite in FP16 from 11.09 = ln(65504) on.

    TensorRT-RTX 1.6.1 was measured to be right at x = 12 and 100.
    """
    border = math.log(survey.request.largest)
    for node in survey.nodes:
        measured = survey.range(node.input[0]) if node.op_type in {"Softplus", "Mish"} else None
        if measured is not None and measured.high > border:
            text = f"exp({measured.high:.3g}) inside {node.op_type} is beyond {survey.request.largest:.4g}"
            reason = f"{text}: {_ELSEWHERE}"
            yield Hazard(node, "internal-overflow", reason, node.input[0], measured, "note")


def inner_cube(survey: Survey) -> Iterator[Hazard]:
    """Gelu in its tanh form cubes inside; beyond 40.3 that is infinite in FP16, and tanh makes 1 of it."""
    for node in survey.nodes:
        if node.op_type != "Gelu" or attribute(node, "approximate", "none") not in {"tanh", b"tanh"}:
            continue
        measured = survey.range(node.input[0])
        if measured is not None and measured.absmax**3 > survey.request.largest:
            reason = "the cube inside Gelu is infinite, which its tanh saturates to 1"
            yield Hazard(node, "internal-overflow", reason, node.input[0], measured, "note")


def steep_powers(survey: Survey) -> Iterator[Hazard]:
    """Squares and higher powers in range on the samples, out of it if the input grows by the head-room.

    A factor h in x is h^k in x^k, so the head-room of the result says too little about that of x.
    """
    for node in survey.nodes:
        power = _power(survey, node)
        measured, result = survey.range(node.input[0]), survey.range(node.output[0])
        if power < 2 or measured is None or result is None or not measured.finite:
            continue
        grown = (survey.request.headroom * measured.absmax) ** min(power, 64.0)
        if result.absmax <= survey.request.limit and grown > survey.request.largest:
            reason = f"to the power of {power:g}, an input of twice the measured size overflows"
            yield Hazard(node, "no-headroom", reason, node.input[0], measured)


def _power(survey: Survey, node: NodeProto) -> float:
    """The exponent of a power that `node` takes; 1 if it takes none."""
    if node.op_type == "Mul" and node.input[0] == node.input[1]:
        return 2.0
    if node.op_type != "Pow":
        return 1.0
    exponent = survey.graph.scalar(survey.source(node.input[1]))
    return 1.0 if exponent is None else exponent


def inner_sums(survey: Survey) -> Iterator[Hazard]:
    """Reductions whose sum leaves the range inside, although the result does not: means of many."""
    if survey.request.low != TensorProto.FLOAT16:
        return
    sums = {"ReduceMean", "ReduceSum", "ReduceL1", "GlobalAveragePool"}
    for node in survey.nodes:
        measured = survey.range(node.input[0]) if node.op_type in sums else None
        count = reduced_count(survey, node) if measured is not None else None
        if measured is None or count is None or not measured.finite:
            continue
        result = survey.range(node.output[0])
        total = count * measured.mean_abs
        if total > survey.request.largest and (result is None or result.absmax <= survey.request.limit):
            reason = f"{node.op_type} sums {count} values, about {total:.2g}, inside: {_ELSEWHERE}"
            yield Hazard(node, "internal-overflow", reason, node.input[0], measured, "note")


def reduced_count(survey: Survey, node: NodeProto) -> int | None:
    """How many elements a reduction makes one of; None if its shapes are not wholly known."""
    axis = attribute(node, "axis", -1) if node.op_type == "LpNormalization" else None
    shape = survey.graph.shape(node.input[0])
    if shape is None or not all(isinstance(d, int) for d in shape):
        return None
    sizes = [d for d in shape if isinstance(d, int)]
    if axis is not None:
        return int(sizes[axis])
    result = survey.graph.shape(node.output[0])
    if result is None or not all(isinstance(d, int) for d in result):
        return None
    kept = math.prod(d for d in result if isinstance(d, int))
    return math.prod(sizes) // max(1, kept)
