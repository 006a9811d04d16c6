"""Hazard rules about what one operator computes inside, which no measured tensor shows."""

from __future__ import annotations

import math
from collections.abc import Iterator

from onnx import NodeProto, TensorProto

from rewriter.edits import attribute
from rewriter.plan import Range
from rewriter.survey import Hazard, Survey

NAIVE_LOG_SUM_EXP = "https://github.com/NVIDIA/TensorRT/issues/4772"

_ELSEWHERE = "TensorRT-RTX 1.6.1 was measured to do this in FP32; other releases may not"


def inner_squares(survey: Survey) -> Iterator[Hazard]:
    """Operators that square inside: the sum of squares leaves the range long before its root does.

    At least absmax^2, and n * mean(|x|)^2 by Jensen's inequality, is the sum of n squares.
    ReduceSumSquare has its sum as a tensor: `overflow` sees that.
    """
    for node in survey.nodes:
        measured = survey.range(node.input[0]) if node.input else None
        if not _squares(node) or measured is None or not measured.finite:
            continue
        count = reduced_count(survey, node) or 1
        total = max(measured.absmax**2, count * measured.mean_abs**2)
        if total > survey.settings.largest:
            text = f"{node.op_type} sums squares up to at least {total:.2g} inside: {_ELSEWHERE}"
            yield Hazard(node, "internal-overflow", text, node.input[0], measured)


def _squares(node: NodeProto) -> bool:
    return node.op_type == "ReduceL2" or (node.op_type == "LpNormalization" and attribute(node, "p", 2) == 2)


def inner_exponentials(survey: Survey) -> Iterator[Hazard]:
    """Operators whose naive form takes exp(x) of a positive x: infinite in FP16 from 11.09 = ln(65504) on.

    TensorRT computes ReduceLogSumExp as log(sum(exp(x))), infinite even in FP32 above 88.7; its
    Softplus was measured to be right up to x = 100.
    """
    border = math.log(survey.settings.largest)
    for node in survey.nodes:
        if node.op_type not in {"ReduceLogSumExp", "Softplus", "Mish"}:
            continue
        measured = survey.range(node.input[0])
        if measured is None or measured.high <= border:
            continue
        reason = f"exp({measured.high:.3g}) inside {node.op_type} is beyond {survey.settings.largest:.4g}"
        if node.op_type == "ReduceLogSumExp":
            repair = "write it with the maximum subtracted: m + log(sum(exp(x - m)))"
            yield _exponential(node, reason, measured, repair, NAIVE_LOG_SUM_EXP)
        else:
            yield Hazard(
                node, "internal-overflow", f"{reason}: {_ELSEWHERE}", node.input[0], measured, "note"
            )


def _exponential(node: NodeProto, reason: str, measured: Range, repair: str, link: str) -> Hazard:
    return Hazard(node, "internal-overflow", reason, node.input[0], measured, "error", repair, link)


def long_softmax(survey: Survey) -> Iterator[Hazard]:
    """A Softmax over more entries than FP16 can count: equal scores sum exp(0) to more than 65504.

    Seen in a fused attention over 65,536 keys: https://github.com/tier4/autoware-ml/pull/95
    """
    for node in survey.nodes:
        shape = survey.graph.shape(node.input[0]) if node.op_type in {"Softmax", "LogSoftmax"} else None
        axis = attribute(node, "axis", -1 if survey.opsets.get("", 13) >= 13 else 1)
        size = shape[axis] if shape and -len(shape) <= axis < len(shape) else None
        if isinstance(size, int) and size > survey.settings.largest:
            reason = f"{node.op_type} over {size} entries may sum up to {size} inside"
            yield Hazard(node, "internal-overflow", reason, node.input[0], survey.range(node.input[0]))


def inner_cube(survey: Survey) -> Iterator[Hazard]:
    """Gelu in its tanh form cubes inside; beyond 40.3 that is infinite in FP16, and tanh makes 1 of it."""
    for node in survey.nodes:
        if node.op_type != "Gelu" or attribute(node, "approximate", "none") not in {"tanh", b"tanh"}:
            continue
        measured = survey.range(node.input[0])
        if measured is not None and measured.absmax**3 > survey.settings.largest:
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
        grown = (survey.settings.headroom * measured.absmax) ** min(power, 64.0)
        if result.absmax <= survey.settings.limit and grown > survey.settings.largest:
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
    if survey.settings.low != TensorProto.FLOAT16:
        return
    sums = {"ReduceMean", "ReduceSum", "ReduceL1", "GlobalAveragePool"}
    for node in survey.nodes:
        measured = survey.range(node.input[0]) if node.op_type in sums else None
        count = reduced_count(survey, node) if measured is not None else None
        if measured is None or count is None or not measured.finite:
            continue
        result = survey.range(node.output[0])
        total = count * measured.mean_abs
        if total > survey.settings.largest and (result is None or result.absmax <= survey.settings.limit):
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
