"""Chooses exponents: the cheapest ones that bring tensors into FP16's range and let none leave it.

These are not difference constraints (a product of two tensors adds exponents, a square doubles one), and the
costs are not convex: a tensor out of range costs the same, however far it is out. But a free exponent has 65
values and few neighbours: each is set to its best value in turn (docs/rescaling.md#how-exponents-are-chosen).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from rewriter.hazards.analysis import GraphAnalysis
from rewriter.hazards.magnitude import FP16_MIN_NORMAL, UNDERFLOW, excess
from rewriter.ir.graph import reachable
from rewriter.ir.graph.ops import QUANTISING, SCALING, TENSOR_CORE
from rewriter.ir.model import Array
from rewriter.passes.algorithms.rescaling.exponents import ConstantUse, Constraints, Form

MAX_EXPONENT = 32
"""Largest absolute exponent. FP16 spans 40 binades; squares of tensors scaled by 2^32 still fit FP32."""

OVERFLOW = 100.0
"""Cost of a tensor that stays out of range, since its nodes stay in FP32. The unit is one binade that one
tensor lacks of its `RESERVE` above the subnormal numbers."""

VANISHING = 8.0
"""Cost per binade of a divisor or radicand whose smallest values lose bits: the quotient then does, too."""

SUBNORMAL = 4.0  # cost per binade of a tensor whose mean is subnormal: most of its values lose bits

EDIT = 0.001
"""Cost of one binade in one constant. It makes the smallest of equally good exponents win."""

BROKEN = 1e7
"""Cost per binade beyond a hard bound: larger than all others, so that no bound is broken in the end."""

WIDEST = 8 * MAX_EXPONENT
"""Bound of the tables: sums of free exponents beyond it are judged as this."""

FREE_VALUES = np.arange(-MAX_EXPONENT, MAX_EXPONENT + 1)

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
multiples of 2^-24, and rounding to multiples of d has an error of d / sqrt(12)."""


def in_range(analysis: GraphAnalysis) -> bool:
    """True if the ranges show by themselves that nothing in a graph needs scaling, as in most graphs."""
    for node in analysis.graph.nodes:
        least = SMALLEST_RMS if node.op_type in MULTIPLYING else 0.0
        for tensor in node.input:
            measured = analysis.range(tensor) if analysis.is_constant(tensor) else None
            if measured is not None and (measured.absmax > analysis.largest or 0 < measured.mean_abs < least):
                return False
        for tensor in node.output:
            measured = analysis.range(tensor) if analysis.is_float(tensor) else None
            if measured and (measured.reach > analysis.largest or 0 < measured.absmax < UNDERFLOW):
                return False
    return True


@dataclass
class Demand:
    """Bounds and costs of one exponent k.

    Attributes:
        low, high: Hard bounds on k: nothing that fits FP16 leaves it, no constant loses a bit in FP32.
        hazards: Tensors that overflow, each with the largest k at which it does not; below 0.
        sunken: Tensors and weights deep in the subnormal range, each with the smallest k that lifts them out
            of it; above 0.
        floors: Soft lower bounds on k, each with its cost per binade.
    """

    low: int = -MAX_EXPONENT
    high: int = MAX_EXPONENT
    hazards: dict[str, int] = field(default_factory=dict)
    sunken: dict[str, int] = field(default_factory=dict)
    floors: dict[int, float] = field(default_factory=dict)
    edits: int = 0  # number of constants that change if k is not 0

    def limit(self, low: int, high: int) -> None:
        """Narrows the hard bounds; k = 0 always stays feasible."""
        self.low = max(self.low, min(low, 0))
        self.high = min(self.high, max(high, 0))

    def floor(self, level: int, cost: float = 1.0) -> None:
        if level > self.low:
            self.floors[level] = self.floors.get(level, 0.0) + cost

    @cached_property
    def costs(self) -> Array:
        """Costs of every k from -`WIDEST` to `WIDEST`."""
        k = np.arange(-WIDEST, WIDEST + 1)
        total: Array = EDIT * (1 + self.edits) * np.abs(k)
        total += BROKEN * np.maximum(0, np.maximum(self.low - k, k - self.high))
        for level in self.hazards.values():
            total += OVERFLOW * (k > level)
        for level, cost in self.floors.items():
            total += cost * np.maximum(0, level - k)
        return total


def demands(analysis: GraphAnalysis, constraints: Constraints) -> tuple[dict[Form, Demand], list[str]]:
    """Demands of one graph by form, and the tensors that overflow and cannot be scaled.

    Without ranges, only constants make demands.
    """
    forms = (constraints.form(number) for number in constraints.tensors.values())
    by_form = {form: Demand() for form in forms if form}
    tied: list[str] = []
    islands = frozenset(id(node) for norm in analysis.norms for node in norm.nodes)
    inner = (t for norm in analysis.norms for n in norm.nodes for t in n.output if t != norm.output)
    hidden = {t for t in inner if all(id(n) in islands for n in analysis.graph.consumers(t))}  # in FP32
    divisors = {n.input[i] for n in analysis.graph.nodes if (i := DIVISORS.get(n.op_type)) is not None}
    for tensor, number in constraints.tensors.items():
        form = constraints.form(number)
        if tensor in hidden:
            continue
        if not form and excess(analysis, tensor):
            tied.append(tensor)
        elif form and analysis.ranges:
            _add_tensor(analysis, tensor, by_form[form], divides=tensor in divisors)
    for use in constraints.constants:
        form, value = constraints.form(use.number), analysis.graph.constant(use.tensor)
        if form and value is not None:
            demand = by_form.setdefault(form, Demand())
            _add_constant(analysis, use, value, demand, in_fp32=id(use.node) in islands)
    return by_form, tied


def _binades(target: float, value: float) -> int:
    """Smallest k with value * 2^k >= target."""
    return math.ceil(math.log2(target / value))


def _add_tensor(analysis: GraphAnalysis, tensor: str, demand: Demand, *, divides: bool) -> None:
    measured = analysis.range(tensor)
    if measured is None or not measured.finite:  # without evidence it keeps its scale
        demand.limit(0, 0)
        return
    if not measured.absmax:
        return
    level = min(MAX_EXPONENT, math.floor(math.log2(analysis.largest / measured.reach)))
    if level >= 0:
        demand.limit(-MAX_EXPONENT, level)
    elif excess(analysis, tensor):
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


def _add_constant(
    analysis: GraphAnalysis, use: ConstantUse, value: Array, demand: Demand, *, in_fp32: bool
) -> None:
    """Demand of one use of a constant; to a consumer that computes `in_fp32` FP16's range does not matter."""
    sizes = np.abs(value[np.isfinite(value) & (value != 0)])
    if not sizes.size:
        return
    demand.edits += 1
    largest, smallest = float(sizes.max()), float(sizes.min())
    demand.limit(FP32_LOWEST - math.frexp(smallest)[1], FP32_HIGHEST - math.frexp(largest)[1])
    if in_fp32:
        return
    level = math.floor(math.log2(analysis.largest / largest))
    if level >= 0:
        demand.limit(-MAX_EXPONENT, min(level, MAX_EXPONENT))
    elif excess(analysis, use.tensor):
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
            if (level := _binades(SMALLEST_RMS, rms)) > 0:
                demand.sunken[use.tensor] = level


def _movable(demands: Mapping[Form, Demand], tensors: Iterable[Form]) -> list[int]:
    """The free exponents that may move, in order.

    Only those move that an exponent which needs scaling depends on, and those beside them in a tensor's form.
    A constant takes up any difference, unless it needs scaling itself: it connects no tensors.
    """
    needing = [form for form, demand in demands.items() if demand.hazards or demand.sunken]
    beside: dict[int, set[int]] = {}
    for form in (*tensors, *needing):
        for key, _ in form:
            beside.setdefault(key, set()).update(other for other, _ in form)
    return sorted(reachable((key for form in needing for key, _ in form), lambda key: beside[key]))


def solve(demands: Mapping[Form, Demand], tensors: Iterable[Form]) -> dict[int, int]:
    """The free exponents other than 0: those that gain most get their best value first, until none gains."""
    uses: dict[int, list[tuple[Form, int]]] = {free: [] for free in _movable(demands, tensors)}
    for form in demands:
        for free, c in form:
            if free in uses:
                uses[free].append((form, c))
    values = {free: 0 for forms in uses.values() for form, _ in forms for free, _ in form}

    def best(free: int) -> tuple[float, int]:
        """The change in cost with the best value of a free exponent, and this value."""
        costs = np.zeros(len(FREE_VALUES))
        for form, c in uses[free]:
            at = sum(factor * values[key] for key, factor in form) + WIDEST
            indices = at + c * (FREE_VALUES - values[free])
            costs += demands[form].costs[np.clip(indices, 0, 2 * WIDEST)]
        index = int(np.argmin(costs))
        return float(costs[index] - costs[values[free] + MAX_EXPONENT]), index - MAX_EXPONENT

    queue = dict.fromkeys(uses)
    while queue:
        order, queue = sorted(queue, key=best), {}
        for free in order:
            gain, value = best(free)
            if gain < -EDIT / 2:
                values[free] = value
                affected = (other for form, _ in uses[free] for other, _ in form)
                queue |= dict.fromkeys(other for other in affected if other != free and other in uses)
    return {free: k for free, k in values.items() if k}
