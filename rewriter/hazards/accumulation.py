"""Hazard rules about sums: FP16 accumulators of products, running sums, and the states of loops.

Products of FP16 tensors accumulate in FP16 on Tensor Cores: docs/hazards.md#fp16-accumulators.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from rewriter.hazards.kinds import Hazard, Severity
from rewriter.hazards.survey import Survey
from rewriter.ir.graph import GraphEditor, attribute, label
from rewriter.ir.graph.fusion import conv_depth, is_plain_transpose
from rewriter.ir.graph.ops import CHEAP, LOOPS, TENSOR_CORE, VIEWS
from rewriter.ir.model import holds_graphs

ERROR_PER_ROOT_DEPTH = 3.7e-5
"""Relative L2 error over sqrt(depth), docs/hazards.md#fp16-accumulators."""

NOTED_ERROR = 2e-3
"""Reached at a depth of 2,900; below, the accumulator errs no more than some ten roundings do."""

LARGE_ERROR = 5e-3
"""The error that case models are held to, reached at a depth of 18,000."""


@dataclass(frozen=True)
class Operand:
    """Absolute values of one operand of a product.

    Attributes:
        l1: Largest sum over the summed axis; exact for constants, else a bound.
    """

    absmax: float
    l1: float
    mean: float


def partial_sums(survey: Survey) -> Iterator[Hazard]:
    """Products whose partial sums can leave FP16's range although their results do not.

    Hoelder's inequality bounds every partial sum by max|a| * sum|b| and by sum|a| * max|b|: within that
    range no sum overflows. Beyond depth * mean|a| * mean|b|, sums overflow wherever many terms in a row
    have one sign. Between the two the hazard is a note. A product between two Casts accumulates in FP32, at
    a small cost: docs/hazards.md#fp16-accumulators.
    """
    for node in survey.nodes if survey.is_fp16 else ():
        depth = None if sums_in_fp32(survey, node) else depth_of(survey, node)
        operands = _operands(survey, node, depth) if depth else None
        if depth is None or operands is None or _overflows_anyway(survey, node):
            continue
        a, b = operands
        bound, usual = min(a.absmax * b.l1, a.l1 * b.absmax), depth * a.mean * b.mean
        if usual > survey.largest:
            reason = f"{depth} terms sum up to about {usual:.2g} if they have one sign"
            yield survey.hazard(node, "partial-sums", reason, node.output[0])
        elif bound > survey.largest:
            reason = f"partial sums of {depth} terms may reach {bound:.2g} in the worst case"
            yield survey.hazard(node, "partial-sums", reason, node.output[0], "note")


def accumulator_error(survey: Survey) -> Iterator[Hazard]:
    """Products so deep that rounding every partial sum to FP16 shows: the error grows with sqrt(depth)."""
    for node in survey.nodes if survey.is_fp16 else ():
        depth = 0 if sums_in_fp32(survey, node) else depth_of(survey, node) or 0
        error = ERROR_PER_ROOT_DEPTH * math.sqrt(depth)
        if error > NOTED_ERROR:
            reason = f"a depth of {depth} gives a relative error of about {error:.1e} in FP16 accumulators"
            severity: Severity | None = "warning" if error > LARGE_ERROR else None
            yield Hazard(node, "accumulator-error", reason, node.output[0], severity=severity)


def accumulation(survey: Survey) -> Iterator[Hazard]:
    """A running sum rounds at every step, and a Loop or Scan at every iteration."""
    for node in survey.nodes:
        if node.op_type == "CumSum":  # increments below half a unit of the sum so far are lost
            reason = f"{label(node)} adds to a sum that grows, and loses what is small beside it"
            yield survey.hazard(node, "accumulation", reason, node.output[0], "warning")
        elif node.op_type in LOOPS:
            yield Hazard(node, "accumulation", "rounding would add up from step to step")
        elif holds_graphs(node) and node.op_type != "If":
            yield Hazard(node, "subgraph", f"{node.op_type} is not taken apart")


def state_update(survey: Survey) -> Iterator[Hazard]:
    """Cheap operators in the body of a Loop or Scan that compute the state of the next iteration."""
    for tensor in filter(survey.is_float, _states(survey.graph)):
        for node in survey.upstream(tensor, lambda n: n.op_type in CHEAP):
            yield Hazard(node, "accumulation", f"state {tensor} goes from iteration to iteration", tensor)


def _states(graph: GraphEditor) -> list[str]:
    """States among a body's outputs: Loop has its condition before them, and both scan outputs after."""
    owner, outputs = graph.owner, [v.name for v in graph.graph.output]
    if owner is None or owner.op_type not in LOOPS:
        return []
    if owner.op_type == "Loop":
        return outputs[1 : len(owner.input) - 1]
    return outputs[: len(owner.input) - attribute(owner, "num_scan_inputs")]


def sums_in_fp32(survey: Survey, node: NodeProto) -> bool:
    """True if `rewriter probe` found that the target accumulates this operator in FP32."""
    kind = "conv" if node.op_type.startswith("Conv") else "matmul"
    if is_plain_transpose(node):
        kind = "conv-transpose"  # other ConvTransposes were not measured: they count as Conv
    return survey.request.target.answers.get(f"{kind}-accumulation") == "fp32"


def depth_of(survey: Survey, node: NodeProto) -> int | None:
    """Number of terms that one element of a product sums; None for other operators or unknown shapes."""
    if node.op_type not in TENSOR_CORE or len(node.input) < 2:
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
    """True if the result itself is out of range: the rules about overflow report it."""
    result = survey.range(node.output[0])
    return result is not None and result.absmax > survey.largest


def _operands(survey: Survey, node: NodeProto, depth: int) -> tuple[Operand, Operand] | None:
    found = [_operand(survey, node, index, depth) for index in (0, 1)]
    return (found[0], found[1]) if found[0] and found[1] else None


def _operand(survey: Survey, node: NodeProto, index: int, depth: int) -> Operand | None:
    tensor = node.input[index]
    value = survey.constant(tensor)
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
    """The axes of a constant operand that the product sums over."""
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
