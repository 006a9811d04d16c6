"""What FP16 asks of every class of exponents: what must not leave its range, and what shall come into it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from onnx import NodeProto

from rewriter.data.ranges.binades import Binades
from rewriter.hazards.magnitude import FP16_MIN_NORMAL, UNDERFLOW, excess, inside_limit, smallest_epsilon
from rewriter.hazards.survey import Survey
from rewriter.patterns.norms import find_norms
from rewriter.plan import Range
from rewriter.rewriting.rescaling.classes import ZERO
from rewriter.rewriting.rescaling.demand import MAX_EXPONENT, RESERVE, SUBNORMAL, VANISHING, Demand
from rewriter.rewriting.rescaling.freedom import Freedom
from rewriter.rewriting.rescaling.weights import MULTIPLYING, SMALLEST_RMS, of_constant

NOTHING: Mapping[str, Binades] = MappingProxyType({})

LOWEST_NORMAL = -14
"""Exponent of FP16's smallest normal number."""

FEW = 0.01
"""Share of a tensor's values that may lose bits for nothing; of a divisor's, `FEWER`."""

FEWER = 1e-3


@dataclass(frozen=True)
class Demands:
    """Demands by class.

    Attributes:
        tied: Tensors that overflow and cannot be scaled.
    """

    classes: dict[int, Demand]
    tied: list[str]


def quiet(survey: Survey) -> bool:
    """Whether the ranges alone say that nothing in a graph asks to be scaled: most graphs, at no cost."""
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
    survey: Survey, freedom: Freedom, *, measured: bool, spread: Mapping[str, Binades] = NOTHING
) -> Demands:
    """What FP16 asks of a graph.

    Args:
        spread: How the values of tensors spread, of those for which that was counted.
        measured: Whether the survey has ranges; without them, only constants are known.
    """
    found = Demands({}, [])
    border = _Border.of(survey)
    for tensor, number in freedom.tensors.items():
        root = freedom.classes.root(number)
        if tensor in border.hidden:
            continue
        if root == ZERO:
            if (tensor in border.tight and _level(survey, tensor, border) < 0) or excess(survey, tensor):
                found.tied.append(tensor)
        elif measured:
            _of_tensor(survey, tensor, found.classes.setdefault(root, Demand()), border, spread.get(tensor))
    for use in freedom.constants:
        root = freedom.classes.root(use.number)
        value = survey.graph.constant(use.tensor)
        if root != ZERO and value is not None:
            demand = found.classes.setdefault(root, Demand())
            of_constant(survey, use, value, demand, inside=id(use.node) in border.islands)
    if measured and survey.request.measured_norms:
        _of_epsilons(survey, freedom, found)
    return found


@dataclass(frozen=True)
class _Border:
    """What is known of tensors by the nodes round them.

    Attributes:
        islands: Nodes (by identity) of norms that are written out and compute in FP32.
        hidden: Tensors between those alone: FP16 never holds them.
        tight: Tensors inside norms that compute in FP16: squares grow twice as fast as what is squared.
        divisors: What is divided by, or has its root taken.
    """

    islands: frozenset[int]
    hidden: frozenset[str]
    tight: frozenset[str]
    divisors: frozenset[str]

    @classmethod
    def of(cls, survey: Survey) -> _Border:
        norms = find_norms(survey.graph)
        inner = {t for norm in norms for node in norm.nodes for t in node.output if t != norm.output}
        index = {"Div": 1, "Sqrt": 0, "Reciprocal": 0}
        nodes = (n for n in survey.graph.nodes if n.op_type in index)
        divisors = frozenset(n.input[index[n.op_type]] for n in nodes)
        if survey.request.measured_norms:
            return cls(frozenset(), frozenset(), frozenset(inner), divisors)
        islands = frozenset(id(node) for norm in norms for node in norm.nodes)
        hidden = {t for t in inner if all(id(n) in islands for n in survey.graph.consumers(t))}
        return cls(islands, frozenset(hidden), frozenset(), divisors)


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


def _level(survey: Survey, tensor: str, border: _Border) -> int:
    """The largest exponent at which a measured tensor is in range; 0 or above if it is now."""
    measured = survey.range(tensor)
    if measured is None or not measured.absmax:
        return MAX_EXPONENT
    if not math.isfinite(measured.absmax):
        return 0
    limit = inside_limit(survey) if tensor in border.tight else survey.request.limit
    return min(MAX_EXPONENT, math.floor(math.log2(limit / measured.absmax)))


def _of_tensor(survey: Survey, tensor: str, demand: Demand, border: _Border, spread: Binades | None) -> None:
    measured = survey.range(tensor)
    if measured is None or not measured.finite:  # nothing is known: it stays as it is
        demand.limit(0, 0)
        return
    level = _level(survey, tensor, border)
    if level >= 0:
        demand.limit(-MAX_EXPONENT, level)
    elif tensor in border.tight or excess(survey, tensor):
        demand.hazards[tensor] = level
    if measured.absmax > 0:
        lowest = math.ceil(math.log2(UNDERFLOW / measured.absmax))
        demand.limit(lowest, MAX_EXPONENT)
        if lowest > 0:
            demand.sunken[tensor] = lowest
    _keep_bits(measured, spread, demand, divides=tensor in border.divisors)


def _keep_bits(measured: Range, spread: Binades | None, demand: Demand, *, divides: bool) -> None:
    """How far down a tensor may go, from how its values spread, or else from their mean."""
    if spread is not None:
        demand.floor(LOWEST_NORMAL - spread.quantile(0.5), SUBNORMAL)
        demand.floor(LOWEST_NORMAL - spread.quantile(FEW))
        if divides:
            demand.floor(LOWEST_NORMAL - spread.quantile(FEWER), VANISHING)
    elif measured.mean_abs > 0:
        normal = math.ceil(math.log2(FP16_MIN_NORMAL / measured.mean_abs))
        demand.floor(normal, SUBNORMAL)
        demand.floor(normal + RESERVE)
        if divides and measured.low > 0:
            demand.floor(math.ceil(math.log2(FP16_MIN_NORMAL / measured.low)), VANISHING)
