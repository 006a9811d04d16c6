"""The user's own rules: functions from a `GraphAnalysis` to hazards (`hazards=`), and limits of values."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any

import numpy as np
from onnx import NodeProto

from rewriter.base.errors import UsageError
from rewriter.hazards.accumulation import depth_of
from rewriter.hazards.analysis import KINDS, GraphAnalysis, Hazard

USER_KIND = "user-rule"  # the kind of a hazard whose rule is not one of `KINDS`


def rules_of_the_user(
    rules: Iterable[Callable[[GraphAnalysis], Iterable[Hazard]]],
) -> tuple[Callable[[GraphAnalysis], Iterator[Hazard]], ...]:
    """The rules, held to what reports need: hazards whose kind is known.

    Raises:
        UsageError: when one runs, it yields something else than hazards.
    """
    return tuple(partial(_hazards, rule) for rule in rules)


_HINT = "give functions from a rewriter.hazards.GraphAnalysis to rewriter.hazards.Hazard objects"


def _hazards(rule: Callable[[GraphAnalysis], Iterable[Hazard]], analysis: GraphAnalysis) -> Iterator[Hazard]:
    name = getattr(rule, "__name__", type(rule).__name__)
    for hazard in rule(analysis) or ():
        if not isinstance(hazard, Hazard):
            raise UsageError(
                f"it yields {hazard!r}, which is no hazard", option="hazards", where=name, hint=_HINT
            )
        if hazard.kind not in KINDS:
            hazard = replace(hazard, kind=USER_KIND, reason=f"{hazard.kind}: {hazard.reason}")
        yield hazard


def limits(
    largest: float | None, largest_weight: float | None, depth: int | None, chooser: Any
) -> Iterator[Callable[[GraphAnalysis], list[Hazard]]]:
    """Rules that keep nodes in FP32 which are beyond a limit; None: there is none.

    Args:
        largest: Of measured values that a node reads and computes, and `largest_weight` of its constants.
        depth: Terms that an element of a product sums.
        chooser: An object whose `check(node)` is True for nodes to keep.

    Raises:
        UsageError: a limit is no number, or the chooser has no such method; AutoCast's arguments are named.
    """
    _refuse_wrong({"data_max": largest, "init_max": largest_weight, "max_depth_of_reduction": depth}, chooser)

    def rule(
        name: str, keeps: Callable[[GraphAnalysis, NodeProto], bool]
    ) -> Callable[[GraphAnalysis], list[Hazard]]:
        return lambda analysis: [
            Hazard(n, name, "beyond the limit") for n in analysis.nodes if keeps(analysis, n)
        ]

    def above(analysis: GraphAnalysis, node: NodeProto, limit: float, *, weights: bool) -> bool:
        tensors = [(analysis.constant(t), analysis.range(t)) for t in analysis.floats(node)]
        if weights:
            return any(c is not None and bool(np.any(np.abs(c) > limit)) for c, _ in tensors)
        return any(c is None and r is not None and r.absmax > limit for c, r in tensors)

    if largest is not None and largest < math.inf:
        yield rule("data_max", lambda analysis, node: above(analysis, node, largest, weights=False))
    if largest_weight is not None:
        yield rule("init_max", lambda analysis, node: above(analysis, node, largest_weight, weights=True))
    if depth is not None:
        yield rule("max_depth_of_reduction", lambda analysis, node: (depth_of(analysis, node) or 0) > depth)
    if chooser is not None:
        yield rule("custom_rule", lambda analysis, node: bool(chooser.check(node)))


def _refuse_wrong(limits: Mapping[str, Any], chooser: Any) -> None:
    for name, limit in limits.items():
        if limit is not None and not (isinstance(limit, Real) and float(limit) >= 0):
            raise UsageError(f"it cannot be {limit!r}", option=name, hint="a number from 0 on, or None")
    if chooser is not None and not callable(getattr(chooser, "check", None)):
        hint = "give an object whose check(node) is True for nodes to keep in FP32"
        raise UsageError(f"it has no check(node): {chooser!r}", option="custom_rule", hint=hint)
