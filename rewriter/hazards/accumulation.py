"""Hazard rules about accumulators: what MatMul, Gemm and Conv add up in FP16 on Tensor Cores.

Measured on an H200 with TensorRT-RTX 1.6.1: products of FP16 tensors accumulate in FP16, partial sums
above 65504 give infinity or NaN even if the result is 1, and the relative L2 error is 1.05e-3 at a depth
of 768, 2.05e-3 at 3072 and 2.36e-3 at 4096. Reductions accumulate in FP32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, TensorProto

from rewriter.graph import attribute, label
from rewriter.graph.fusion import conv_depth, is_plain_transpose
from rewriter.hazards.kinds import Severity
from rewriter.hazards.survey import VIEWS, Hazard, Survey

ERROR_PER_ROOT_DEPTH = 3.7e-5
"""Relative L2 error over sqrt(depth): 1.05e-3 / sqrt(768) = 3.8e-5, 2.36e-3 / sqrt(4096) = 3.7e-5."""

NOTED_ERROR = 2e-3
"""From a depth of 2,900 on; below, the accumulator errs no more than some ten roundings do."""

LARGE_ERROR = 5e-3
"""The error that case models are held to, from a depth of 18,000 on."""


@dataclass(frozen=True)
class Operand:
    """One operand of a product, along the axis that is summed.

    Attributes:
        absmax: Largest absolute value.
        l1: Largest sum of absolute values over the summed axis; exact for constants, a bound otherwise.
        mean: Mean of the absolute values.
    """

    absmax: float
    l1: float
    mean: float


def partial_sums(survey: Survey) -> Iterator[Hazard]:
    """Products whose partial sums can leave FP16's range although their results do not.

    Hoelder's inequality bounds every partial sum by max|a| * sum|b| and by sum|a| * max|b|: if that is
    in range, nothing can happen. If depth * mean|a| * mean|b| is out of range, it happens wherever the
    terms of a row have one sign for long; between the two it is a note.
    """
    largest = survey.request.largest
    for node in survey.nodes if survey.request.low == TensorProto.FLOAT16 else ():
        depth = None if sums_in_fp32(survey, node) else depth_of(survey, node)
        operands = _operands(survey, node, depth) if depth else None
        if depth is None or operands is None or _overflows_anyway(survey, node):
            continue
        a, b = operands
        bound, usual = min(a.absmax * b.l1, a.l1 * b.absmax), depth * a.mean * b.mean
        if usual > largest:
            text = f"{depth} terms sum up to about {usual:.2g} if they have one sign"
            yield Hazard(node, "partial-sums", text, node.output[0], survey.range(node.output[0]))
        elif bound > largest:
            text = f"partial sums of {depth} terms may reach {bound:.2g} in the worst case"
            output = node.output[0]
            yield Hazard(node, "partial-sums", text, output, survey.range(output), "note")


def likely_partial_sums(survey: Survey) -> Iterator[Hazard]:
    """Those of `partial_sums` that need no worst case. FP32 round the product alone is FP32 accumulation.

    Measured on an H200, TensorRT-RTX 1.6.1: finite, at 4 to 10 % of a large MatMul's time.
    """
    return (hazard for hazard in partial_sums(survey) if hazard.severity is None)


def accumulator_error(survey: Survey) -> Iterator[Hazard]:
    """Products so deep that rounding every partial sum to FP16 shows: the error grows with sqrt(depth)."""
    for node in survey.nodes if survey.request.low == TensorProto.FLOAT16 else ():
        depth = 0 if sums_in_fp32(survey, node) else depth_of(survey, node) or 0
        error = ERROR_PER_ROOT_DEPTH * math.sqrt(depth)
        if error > NOTED_ERROR:
            reason = f"a depth of {depth} gives a relative error of about {error:.1e} in FP16 accumulators"
            severity: Severity | None = "warning" if error > LARGE_ERROR else None
            yield Hazard(node, "accumulator-error", reason, node.output[0], severity=severity)


def running_sums(survey: Survey) -> Iterator[Hazard]:
    """CumSum over floats: increments below half a unit of the sum so far are lost."""
    for node in survey.nodes:
        if node.op_type == "CumSum":
            reason = f"{label(node)} adds to a sum that grows, and loses what is small beside it"
            measured = survey.range(node.output[0])
            yield Hazard(node, "accumulation", reason, node.output[0], measured, "warning")


def sums_in_fp32(survey: Survey, node: NodeProto) -> bool:
    """Whether the target was measured (`rewriter probe`) to accumulate in FP32."""
    kind = "conv" if node.op_type.startswith("Conv") else "matmul"
    if is_plain_transpose(node):
        kind = "conv-transpose"  # others were not measured: they count as Conv
    return survey.request.target.answers.get(f"{kind}-accumulation") == "fp32"


def depth_of(survey: Survey, node: NodeProto) -> int | None:
    """How many products one element of the result sums; None for other operators and unknown shapes."""
    if node.op_type not in {"MatMul", "Gemm", "Conv", "ConvTranspose"} or len(node.input) < 2:
        return None
    a, b = (survey.graph.shape(t) for t in node.input[:2])
    if node.op_type == "MatMul":
        dims = [*(a or ())[-1:], *((b or ())[-2:-1] if b and len(b) > 1 else (b or ())[-1:])]
        return next((d for d in dims if isinstance(d, int)), None)
    if node.op_type == "Gemm":
        dims = [*_axis(a, 0 if attribute(node, "transA", 0) else 1), *_axis(b, attribute(node, "transB", 0))]
        return next((d for d in dims if isinstance(d, int)), None)
    if b is None or not all(isinstance(d, int) for d in b):
        return None
    return conv_depth(node, [d for d in b if isinstance(d, int)])


def _axis(shape: tuple[int | str | None, ...] | None, axis: int) -> tuple[int | str | None, ...]:
    return (shape[axis],) if shape and len(shape) > axis else ()


def _overflows_anyway(survey: Survey, node: NodeProto) -> bool:
    """Whether the result is out of range itself, which is another rule's matter."""
    result = survey.range(node.output[0])
    return result is not None and result.absmax > survey.request.largest


def _operands(survey: Survey, node: NodeProto, depth: int) -> tuple[Operand, Operand] | None:
    found = [_operand(survey, node, index, depth) for index in (0, 1)]
    return (found[0], found[1]) if found[0] and found[1] else None


def _operand(survey: Survey, node: NodeProto, index: int, depth: int) -> Operand | None:
    tensor = node.input[index]
    value = survey.graph.constant(survey.source(tensor))
    if value is not None and value.size and value.dtype.kind == "f":
        absolute = np.abs(value.astype(np.float32, copy=False))
        sums = absolute.sum(axis=_summed_axes(node, index, value.ndim), dtype=np.float64)
        return Operand(float(absolute.max()), float(np.max(sums)), float(absolute.mean(dtype=np.float64)))
    measured = survey.range(tensor)
    if measured is None or not measured.finite:
        return None
    if index == 0 and _is_softmax(survey, tensor):  # its rows sum to 1
        return Operand(measured.absmax, 1.0, 1.0 / depth)
    return Operand(measured.absmax, depth * measured.absmax, measured.mean_abs)


def _summed_axes(node: NodeProto, index: int, rank: int) -> tuple[int, ...]:
    """The axes of a constant operand over which one element of the result sums."""
    if node.op_type == "Conv":
        return tuple(range(1, rank))
    if node.op_type == "ConvTranspose":
        return (0, *range(2, rank))
    if node.op_type == "Gemm":
        turned = bool(attribute(node, "transB" if index else "transA", 0))
        return (int(turned != (index == 0)),)
    return (max(0, rank - 2),) if index else (rank - 1,)


def _is_softmax(survey: Survey, tensor: str) -> bool:
    producer = survey.producer(tensor)
    while producer is not None and producer.op_type in VIEWS | {"Dropout"}:
        producer = survey.producer(producer.input[0])
    return producer is not None and producer.op_type == "Softmax"
