"""Derives the demand on every exponent: what must stay in FP16's range, what must come into it."""

from __future__ import annotations

import math

import numpy as np

from rewriter.hazards.magnitude import FP16_MIN_NORMAL, UNDERFLOW, excess
from rewriter.hazards.survey import Survey
from rewriter.ir.graph.ops import QUANTISING, SCALING, TENSOR_CORE
from rewriter.ir.model import Array
from rewriter.passes.algorithms.rescaling.exponents import ConstantUse, Constraints, Form
from rewriter.passes.algorithms.rescaling.solve import MAX_EXPONENT, SUBNORMAL, VANISHING, Demand

RESERVE = 4
"""Binades worth keeping between a tensor's mean absolute value and FP16's smallest normal number: values 16
times below the mean then keep all their bits."""

FP32_LOWEST, FP32_HIGHEST = -125, 128
"""Exponents, as frexp gives them, of FP32's smallest normal and of its largest number."""

DIVISORS = {"Div": 1, "Sqrt": 0, "Reciprocal": 0}
"""The input of an operator that is a divisor or radicand."""

MULTIPLYING = TENSOR_CORE | SCALING | {"Einsum"}
"""Operators whose result has the relative error of their constant."""

WEIGHT_ERROR = 1e-3
"""Relative L2 error by rounding from which weights are worth scaling. Normal numbers have 2.1e-4, the root
mean square of a relative error of up to 2^-11."""

SMALLEST_RMS = 2.0**-24 / math.sqrt(12) / WEIGHT_ERROR
"""Root mean square of subnormal weights that rounding changes by `WEIGHT_ERROR`: FP16's subnormal numbers are
multiples of 2^-24, and rounding to multiples of d errs by d / sqrt(12)."""


def in_range(survey: Survey) -> bool:
    """True if the ranges alone show that nothing in a graph needs scaling, as in most graphs."""
    highest = survey.request.limit
    for node in survey.graph.nodes:
        least = SMALLEST_RMS if node.op_type in MULTIPLYING else 0.0
        for tensor in node.input:
            measured = survey.range(tensor) if survey.is_constant(tensor) else None
            if measured is not None and (
                measured.absmax > survey.request.largest or 0 < measured.mean_abs < least
            ):
                return False
        for tensor in node.output:
            measured = survey.range(tensor) if survey.is_float(tensor) else None
            if measured is not None and (measured.absmax > highest or 0 < measured.absmax < UNDERFLOW):
                return False
    return True


def demands(
    survey: Survey, constraints: Constraints, *, measured: bool
) -> tuple[dict[Form, Demand], list[str]]:
    """Demands of one graph by form, and the tensors that overflow and cannot be scaled.

    Args:
        measured: True if the survey has ranges; without them, only constants make demands.
    """
    found: dict[Form, Demand] = {}
    tied: list[str] = []
    islands = frozenset(id(node) for norm in survey.norms for node in norm.nodes)
    hidden = _hidden(survey, islands)
    divisors = {n.input[i] for n in survey.graph.nodes if (i := DIVISORS.get(n.op_type)) is not None}
    for tensor, number in constraints.tensors.items():
        form = constraints.exponents.form(number)
        if tensor in hidden:
            continue
        if not form and excess(survey, tensor):
            tied.append(tensor)
        elif form and measured:
            _add_tensor(survey, tensor, found.setdefault(form, Demand()), divides=tensor in divisors)
    for use in constraints.constants:
        form, value = constraints.exponents.form(use.number), survey.graph.constant(use.tensor)
        if form and value is not None:
            demand = found.setdefault(form, Demand())
            _add_constant(survey, use, value, demand, in_fp32=id(use.node) in islands)
    return found, tied


def _hidden(survey: Survey, islands: frozenset[int]) -> set[str]:
    """Tensors that only nodes of decomposed norms see: these compute in FP32."""
    inner = (t for norm in survey.norms for n in norm.nodes for t in n.output if t != norm.output)
    return {t for t in inner if all(id(n) in islands for n in survey.graph.consumers(t))}


def _binades(target: float, value: float) -> int:
    """Smallest k with value * 2^k >= target."""
    return math.ceil(math.log2(target / value))


def _add_tensor(survey: Survey, tensor: str, demand: Demand, *, divides: bool) -> None:
    measured = survey.range(tensor)
    if measured is None or not measured.finite:  # without evidence it keeps its scale
        demand.limit(0, 0)
        return
    if not measured.absmax:
        return
    level = min(MAX_EXPONENT, math.floor(math.log2(survey.request.limit / measured.absmax)))
    if level >= 0:
        demand.limit(-MAX_EXPONENT, level)
    elif excess(survey, tensor):
        demand.hazards[tensor] = level
    lowest = _binades(UNDERFLOW, measured.absmax)
    demand.limit(lowest, MAX_EXPONENT)
    if lowest > 0:
        demand.sunken[tensor] = lowest
    if measured.mean_abs > 0:
        _keep_mean(measured.mean_abs, demand)
        if divides and measured.low > 0:
            demand.floor(_binades(FP16_MIN_NORMAL, measured.low), VANISHING)


def _keep_mean(mean: float, demand: Demand) -> None:
    normal = _binades(FP16_MIN_NORMAL, mean)
    demand.floor(normal, SUBNORMAL)
    demand.floor(normal + RESERVE)


def _add_constant(survey: Survey, use: ConstantUse, value: Array, demand: Demand, *, in_fp32: bool) -> None:
    """Demand of one use of a constant.

    Args:
        in_fp32: True if the consumer computes in FP32, so that FP16's range does not matter.
    """
    sizes = np.abs(value[np.isfinite(value) & (value != 0)])
    if not sizes.size:
        return
    demand.edits += 1
    largest, smallest = float(sizes.max()), float(sizes.min())
    demand.limit(FP32_LOWEST - math.frexp(smallest)[1], FP32_HIGHEST - math.frexp(largest)[1])
    if in_fp32:
        return
    level = math.floor(math.log2(survey.request.largest / largest))
    if level >= 0:
        demand.limit(-MAX_EXPONENT, min(level, MAX_EXPONENT))
    elif excess(survey, use.tensor):
        demand.hazards[use.tensor] = level
    if largest >= UNDERFLOW:
        demand.floor(_binades(UNDERFLOW, largest), VANISHING)
    if use.node.op_type in QUANTISING:  # quantised values are multiples of the scale, so each bit counts
        demand.floor(_binades(FP16_MIN_NORMAL, smallest), VANISHING)
    if use.node.op_type in MULTIPLYING:
        mean = float(sizes.mean(dtype=np.float64))
        _keep_mean(mean, demand)
        if mean < SMALLEST_RMS:  # the root mean square is at least the mean
            rms = math.sqrt(float(np.mean(np.square(sizes, dtype=np.float64))))
            level = _binades(SMALLEST_RMS, rms)
            if level > 0:
                demand.sunken[use.tensor] = level
