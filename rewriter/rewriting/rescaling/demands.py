"""Derives the demand on every class of exponents: what must stay in FP16's range, what must come into it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from onnx import NodeProto

from rewriter.data.ranges.binades import Binades
from rewriter.graph.ops import QUANTISING, SCALING, TENSOR_CORE
from rewriter.hazards.magnitude import FP16_MIN_NORMAL, UNDERFLOW, excess, inside_limit, smallest_epsilon
from rewriter.hazards.survey import Survey
from rewriter.model import Array
from rewriter.plan import Range
from rewriter.rewriting.rescaling.classes import ZERO
from rewriter.rewriting.rescaling.constraints import ConstantUse, Constraints
from rewriter.rewriting.rescaling.programme import MAX_EXPONENT, SUBNORMAL, VANISHING, Demand

NOTHING: Mapping[str, Binades] = MappingProxyType({})

LOWEST_NORMAL = -14
"""Exponent of FP16's smallest normal number."""

RESERVE = 4
"""Binades worth keeping between a tensor's mean absolute value and FP16's smallest normal number: values 16
times below the mean then keep all their bits."""

FEW, FEWER = 0.01, 1e-3
"""Share of a tensor's values, and of a divisor's, that may lose bits at no cost."""

FP32_LOWEST, FP32_HIGHEST = -125, 128
"""Exponents, as frexp gives them, of FP32's smallest normal and of its largest number."""

MULTIPLYING = TENSOR_CORE | SCALING | {"Einsum"}
"""Operators whose result has the relative error of their constant."""

WEIGHT_ERROR = 1e-3
"""Relative L2 error by rounding from which weights are worth scaling. Normal numbers have 2.1e-4, the root
mean square of a relative error of up to 2^-11."""

SMALLEST_RMS = 2.0**-24 / math.sqrt(12) / WEIGHT_ERROR
"""Root mean square of subnormal weights that rounding changes by `WEIGHT_ERROR`: FP16's subnormal numbers are
multiples of 2^-24, and rounding to multiples of d errs by d / sqrt(12)."""


@dataclass(frozen=True)
class Demands:
    """Demands by class.

    Attributes:
        tied: Tensors that overflow and cannot be scaled.
    """

    classes: dict[int, Demand]
    tied: list[str]


def in_range(survey: Survey) -> bool:
    """True if the ranges alone show that nothing in a graph needs scaling, as in most graphs."""
    highest = inside_limit(survey) if survey.request.measured_norms else survey.request.limit
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
    survey: Survey, constraints: Constraints, *, measured: bool, spread: Mapping[str, Binades] = NOTHING
) -> Demands:
    """Demands of one graph.

    Args:
        spread: Counted distributions of values, for tensors that have one.
        measured: True if the survey has ranges; without them, only constants make demands.
    """
    found = Demands({}, [])
    context = _Context.of(survey)
    for tensor, number in constraints.tensors.items():
        root = constraints.classes.root(number)
        if tensor in context.hidden:
            continue
        if root == ZERO:
            if (tensor in context.squares and _level(survey, tensor, context) < 0) or excess(survey, tensor):
                found.tied.append(tensor)
        elif measured:
            demand = found.classes.setdefault(root, Demand())
            _add_tensor(survey, tensor, demand, context, spread.get(tensor))
    for use in constraints.constants:
        root = constraints.classes.root(use.number)
        value = survey.graph.constant(use.tensor)
        if root != ZERO and value is not None:
            demand = found.classes.setdefault(root, Demand())
            _add_constant(survey, use, value, demand, in_fp32=id(use.node) in context.islands)
    if measured and survey.request.measured_norms:
        _add_epsilons(survey, constraints, found)
    return found


@dataclass(frozen=True)
class _Context:
    """Roles that tensors have by their producers and consumers.

    Attributes:
        islands: Nodes, by identity, of decomposed norms that compute in FP32.
        hidden: Tensors that only these nodes see: FP16 never holds them.
        squares: Tensors inside decomposed norms that compute in FP16: squares need more head-room.
        divisors: Divisors and radicands.
    """

    islands: frozenset[int]
    hidden: frozenset[str]
    squares: frozenset[str]
    divisors: frozenset[str]

    @classmethod
    def of(cls, survey: Survey) -> _Context:
        norms = survey.norms
        inner = {t for norm in norms for node in norm.nodes for t in node.output if t != norm.output}
        index = {"Div": 1, "Sqrt": 0, "Reciprocal": 0}
        nodes = (n for n in survey.graph.nodes if n.op_type in index)
        divisors = frozenset(n.input[index[n.op_type]] for n in nodes)
        if survey.request.measured_norms:
            return cls(frozenset(), frozenset(), frozenset(inner), divisors)
        islands = frozenset(id(node) for norm in norms for node in norm.nodes)
        hidden = {t for t in inner if all(id(n) in islands for n in survey.graph.consumers(t))}
        return cls(islands, frozenset(hidden), frozenset(), divisors)


def _binades(target: float, value: float) -> int:
    """Smallest k with value * 2^k >= target."""
    return math.ceil(math.log2(target / value))


def _add_epsilons(survey: Survey, constraints: Constraints, found: Demands) -> None:
    """Epsilon scales with the squares, and its root must stay large enough for FP16."""
    for norm in survey.norms:
        roots = (n for n in norm.nodes if n.op_type in {"Sqrt", "Pow"})
        radicands = (n.input[0] for n in roots if n.op_type == "Sqrt" or not _squares(survey, n))
        for number in (constraints.tensors[t] for t in radicands if t in constraints.tensors):
            demand = found.classes.get(constraints.classes.root(number))
            smallest = smallest_epsilon(survey, norm)
            if demand is not None and norm.epsilon > 0 and smallest > 0:
                demand.floor(_binades(smallest, norm.epsilon), VANISHING)


def _squares(survey: Survey, node: NodeProto) -> bool:
    exponent = survey.graph.scalar(node.input[1])
    return exponent is not None and exponent > 1


def _level(survey: Survey, tensor: str, context: _Context) -> int:
    """Largest exponent at which a measured tensor is in range; below 0 if it is out of range now."""
    measured = survey.range(tensor)
    if measured is None or not measured.absmax:
        return MAX_EXPONENT
    if not math.isfinite(measured.absmax):
        return 0
    limit = inside_limit(survey) if tensor in context.squares else survey.request.limit
    return min(MAX_EXPONENT, math.floor(math.log2(limit / measured.absmax)))


def _add_tensor(
    survey: Survey, tensor: str, demand: Demand, context: _Context, spread: Binades | None
) -> None:
    measured = survey.range(tensor)
    if measured is None or not measured.finite:  # without evidence it keeps its scale
        demand.limit(0, 0)
        return
    level = _level(survey, tensor, context)
    if level >= 0:
        demand.limit(-MAX_EXPONENT, level)
    elif tensor in context.squares or excess(survey, tensor):
        demand.hazards[tensor] = level
    if measured.absmax > 0:
        lowest = _binades(UNDERFLOW, measured.absmax)
        demand.limit(lowest, MAX_EXPONENT)
        if lowest > 0:
            demand.sunken[tensor] = lowest
    _keep_bits(measured, spread, demand, divides=tensor in context.divisors)


def _keep_bits(measured: Range, spread: Binades | None, demand: Demand, *, divides: bool) -> None:
    """Soft lower bounds from the quantiles of a tensor's values, or from their mean if none were counted."""
    if spread is not None:
        demand.floor(LOWEST_NORMAL - spread.quantile(0.5), SUBNORMAL)
        demand.floor(LOWEST_NORMAL - spread.quantile(FEW))
        if divides:
            demand.floor(LOWEST_NORMAL - spread.quantile(FEWER), VANISHING)
    elif measured.mean_abs > 0:
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
