"""What FP16 asks of the constants that take up the factors."""

from __future__ import annotations

import math

import numpy as np

from rewriter.graph.ops import QUANTISING, SCALING, TENSOR_CORE
from rewriter.hazards.magnitude import FP16_MIN_NORMAL, UNDERFLOW, excess
from rewriter.hazards.survey import Survey
from rewriter.model import Array
from rewriter.rewriting.rescaling.demand import MAX_EXPONENT, RESERVE, SUBNORMAL, VANISHING, Demand
from rewriter.rewriting.rescaling.freedom import ConstantUse

FP32_LOWEST, FP32_HIGHEST = -125, 128
"""Exponents, as frexp has them, of FP32's smallest normal and of its largest number."""

MULTIPLYING = TENSOR_CORE | SCALING | {"Einsum"}
"""Operators whose result errs relatively as much as their constant does."""

"""Operators that need all bits of their scale: what is quantised lies between its multiples."""

WEIGHT_ERROR = 1e-3
"""Relative L2 error of rounded weights that is worth scaling them for; normal numbers lose 2.1e-4 (the
root mean square of a relative error of up to 2^-11)."""

SMALLEST_RMS = 2.0**-24 / math.sqrt(12) / WEIGHT_ERROR
"""Root mean square of subnormal weights that are rounded by `WEIGHT_ERROR`: subnormal numbers are
multiples of 2^-24, and what is rounded to multiples of d errs by d / sqrt(12)."""


def of_constant(survey: Survey, use: ConstantUse, value: Array, demand: Demand, *, inside: bool) -> None:
    """Ask for what one use of a constant needs.

    Args:
        inside: Whether the node that reads it computes in FP32.
    """
    sizes = np.abs(value[np.isfinite(value) & (value != 0)])
    if not sizes.size:
        return
    demand.weight += 1
    largest, smallest = float(sizes.max()), float(sizes.min())
    demand.limit(FP32_LOWEST - math.frexp(smallest)[1], FP32_HIGHEST - math.frexp(largest)[1])
    if inside:
        return
    level = math.floor(math.log2(survey.request.largest / largest))
    if level >= 0:
        demand.limit(-MAX_EXPONENT, min(level, MAX_EXPONENT))
    elif excess(survey, use.tensor):
        demand.hazards[use.tensor] = level
    if largest >= UNDERFLOW:
        demand.floor(math.ceil(math.log2(UNDERFLOW / largest)), VANISHING)
    if use.node.op_type in QUANTISING:
        demand.floor(math.ceil(math.log2(FP16_MIN_NORMAL / smallest)), VANISHING)
    if use.node.op_type in MULTIPLYING:
        mean = float(sizes.mean(dtype=np.float64))
        normal = math.ceil(math.log2(FP16_MIN_NORMAL / mean))
        demand.floor(normal, SUBNORMAL)
        demand.floor(normal + RESERVE)
        _of_small_weights(use.tensor, sizes, mean, demand)


def _of_small_weights(tensor: str, sizes: Array, mean: float, demand: Demand) -> None:
    if mean >= SMALLEST_RMS:  # the root mean square is not smaller than the mean
        return
    rms = math.sqrt(float(np.mean(np.square(sizes, dtype=np.float64))))
    level = math.ceil(math.log2(SMALLEST_RMS / rms))
    if level > 0:
        demand.sunken[tensor] = level
