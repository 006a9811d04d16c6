"""What FP16 asks of every class of exponents: what must not leave its range, and what shall come into it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from onnx import NodeProto

from rewriter.hazards.magnitude import FP16_MIN_NORMAL, UNDERFLOW, excess, inside_limit, smallest_epsilon
from rewriter.hazards.survey import Survey
from rewriter.model import Array
from rewriter.norms import find_norms
from rewriter.rescaling.classes import ZERO
from rewriter.rescaling.freedom import ConstantUse, Freedom

MAX_EXPONENT = 32
"""Largest exponent either way: FP16 spans 40 binades, and FP32's 254 hold squares of what is scaled so."""

RESERVE = 4
"""Binades between the mean of a tensor's absolute values and FP16's smallest normal number that are
worth keeping: values 16 times below the mean then keep all their bits."""

FP32_LOWEST, FP32_HIGHEST = -125, 128
"""Exponents, as frexp has them, of FP32's smallest normal and of its largest number."""


@dataclass
class Demand:
    """What is asked of the exponent k of one class.

    Attributes:
        low, high: Bounds on k. Nothing that fits FP16 leaves it, no constant loses a bit in FP32.
        hazards: Tensors that overflow, with the largest k at which they do not; below 0.
        floors: How many tensors want k to be at least so large.
        weight: How many constants change if k is not 0.
    """

    low: int = -MAX_EXPONENT
    high: int = MAX_EXPONENT
    hazards: dict[str, int] = field(default_factory=dict)
    floors: dict[int, float] = field(default_factory=dict)
    weight: int = 0

    def limit(self, low: int, high: int) -> None:
        """Narrow the bounds; k = 0 always stays possible."""
        self.low = max(self.low, min(low, 0))
        self.high = min(self.high, max(high, 0))

    def floor(self, level: int, weight: float = 1.0) -> None:
        if level > self.low:
            self.floors[level] = self.floors.get(level, 0.0) + weight


VANISHING = 8.0
"""Weight of a divisor or radicand: when its smallest value loses bits, the quotient does."""

SUBNORMAL = 4.0
"""Weight of a tensor whose mean leaves the normal range: most of its values lose bits."""


@dataclass(frozen=True)
class Demands:
    """Demands by class.

    Attributes:
        tied: Tensors that overflow and cannot be scaled.
    """

    classes: dict[int, Demand]
    tied: list[str]


def demands(survey: Survey, freedom: Freedom, *, measured: bool) -> Demands:
    """What FP16 asks of a graph.

    Args:
        measured: Whether the survey has ranges; without them, only constants are known.
    """
    found = Demands({}, [])
    tight = _inside_norms(survey)
    vanishing = _divisors(survey)
    for tensor, number in freedom.tensors.items():
        root = freedom.classes.root(number)
        if root == ZERO:
            if (tensor in tight and _level(survey, tensor, tight) < 0) or excess(survey, tensor):
                found.tied.append(tensor)
        elif measured:
            demand = found.classes.setdefault(root, Demand())
            _of_tensor(survey, tensor, demand, tight, tensor in vanishing)
    for use in freedom.constants:
        root = freedom.classes.root(use.number)
        value = survey.graph.constant(use.tensor)
        if root != ZERO and value is not None:
            _of_constant(survey, use, value, found.classes.setdefault(root, Demand()))
    if measured:
        _of_epsilons(survey, freedom, found)
    return found


def _of_epsilons(survey: Survey, freedom: Freedom, found: Demands) -> None:
    """Epsilon goes with the squares, and shall stay large enough for its root in FP16."""
    for norm in find_norms(survey.graph):
        roots = (n for n in norm.nodes if n.op_type in {"Sqrt", "Pow"})
        radicands = (n.input[0] for n in roots if n.op_type == "Sqrt" or not _squares(survey, n))
        for number in (freedom.tensors[t] for t in radicands if t in freedom.tensors):
            demand = found.classes.get(freedom.classes.root(number))
            smallest = smallest_epsilon(survey, norm)
            if demand is not None and norm.epsilon > 0 and smallest > 0:
                demand.floor(math.ceil(math.log2(smallest / norm.epsilon)), VANISHING)


def _squares(survey: Survey, node: NodeProto) -> bool:
    exponent = survey.graph.scalar(node.input[1])
    return exponent is not None and exponent > 1


def _inside_norms(survey: Survey) -> frozenset[str]:
    """The tensors inside decomposed normalisations: squares grow twice as fast as what is squared."""
    return frozenset(
        name
        for norm in find_norms(survey.graph)
        for node in norm.nodes
        for name in node.output
        if name != norm.output
    )


def _divisors(survey: Survey) -> frozenset[str]:
    """What is divided by, or has its root taken."""
    index = {"Div": 1, "Sqrt": 0, "Reciprocal": 0}
    nodes = (n for n in survey.graph.nodes if n.op_type in index)
    return frozenset(n.input[index[n.op_type]] for n in nodes)


def _level(survey: Survey, tensor: str, tight: frozenset[str]) -> int:
    """The largest exponent at which a measured tensor is in range; 0 or above if it is now."""
    measured = survey.range(tensor)
    if measured is None or not measured.absmax:
        return MAX_EXPONENT
    if not math.isfinite(measured.absmax):
        return 0
    limit = inside_limit(survey) if tensor in tight else survey.settings.limit
    return min(MAX_EXPONENT, math.floor(math.log2(limit / measured.absmax)))


def _of_tensor(survey: Survey, tensor: str, demand: Demand, tight: frozenset[str], divides: bool) -> None:
    measured = survey.range(tensor)
    if measured is None or not measured.finite:  # nothing is known: it stays as it is
        demand.limit(0, 0)
        return
    level = _level(survey, tensor, tight)
    if level >= 0:
        demand.limit(-MAX_EXPONENT, level)
    elif tensor in tight or excess(survey, tensor):
        demand.hazards[tensor] = level
    if measured.absmax > 0:
        demand.limit(math.ceil(math.log2(UNDERFLOW / measured.absmax)), MAX_EXPONENT)
    if measured.mean_abs > 0:
        normal = math.ceil(math.log2(FP16_MIN_NORMAL / measured.mean_abs))
        demand.floor(normal, SUBNORMAL)
        demand.floor(normal + RESERVE)
    if divides and measured.low > 0:
        demand.floor(math.ceil(math.log2(FP16_MIN_NORMAL / measured.low)), VANISHING)


def _of_constant(survey: Survey, use: ConstantUse, value: Array, demand: Demand) -> None:
    sizes = np.abs(value[np.isfinite(value) & (value != 0)])
    if not sizes.size:
        return
    demand.weight += 1
    largest, smallest, mean = float(sizes.max()), float(sizes.min()), float(sizes.mean(dtype=np.float64))
    demand.limit(FP32_LOWEST - math.frexp(smallest)[1], FP32_HIGHEST - math.frexp(largest)[1])
    level = math.floor(math.log2(survey.settings.largest / largest))
    if level >= 0:
        demand.limit(-MAX_EXPONENT, min(level, MAX_EXPONENT))
    elif excess(survey, use.tensor):
        demand.hazards[use.tensor] = level
    if largest >= UNDERFLOW:
        demand.floor(math.ceil(math.log2(UNDERFLOW / largest)), VANISHING)
    if use.node.op_type in {"Mul", "MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "Div"}:
        demand.floor(math.ceil(math.log2(FP16_MIN_NORMAL / mean)) + RESERVE)
