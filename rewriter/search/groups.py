"""The groups of nodes that a search on an engine tries: those of one operator, one rule or one place.

Single nodes are too many to build, and what makes an engine faster is seldom one node: on an H200 a SegFormer
was 1.10 times faster with four Resizes and nine Reshapes in FP32, which broke a slow fusion. No estimate
tells that; a build does.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain

from onnx import NodeProto

from rewriter.errors import TimeUpError
from rewriter.graph.ops import (
    CHEAP,
    COMPUTE_BOUND,
    CONVOLUTIONS,
    NORMS,
    PRODUCTS,
    REDUCTIONS,
    RESHAPES,
    RESIZES,
    SOFTMAX,
    VIEWS,
)
from rewriter.hazards.survey import Survey
from rewriter.planning import free_fp32, islands
from rewriter.planning.planner import node_key
from rewriter.search.candidate import Candidate, Group, added
from rewriter.search.cheapest import RELEASABLE, in_range_products
from rewriter.search.goal import Budget, ErrorLimit, Goal
from rewriter.search.trials import Trials, Types
from rewriter.search.within import row_within

FOR_ACCURACY = RELEASABLE | free_fp32.FREE | {islands.RULE}
"""Rules whose nodes an engine may find slower in FP32 than they are worth."""

ESTIMATE_OFF = 0.12
"""Error of an estimated latency relative to the rules' plan, for nine plans of ten (docs/plans.md)."""

SIZES = (2, 8, 32)
"""How many of the best-ranked nodes of a kind are tried in FP32."""

BUDGETS = (1.0, 0.5, 2.0, 0.25)
"""Shares of a budget of latency that the best-ranked nodes are to fill by the estimate, in order of trial:
what was estimated at 10 % took 3 to 23 % on an H200 (UNet and NAFNet, benchmarks/side_by_side.md)."""

_REDUCTIONS = REDUCTIONS | {"GlobalAveragePool", "AveragePool"}

KINDS: tuple[tuple[str, frozenset[str]], ...] = (
    ("Resize", RESIZES),
    ("Softmax", SOFTMAX),
    ("elementwise", CHEAP - VIEWS - SOFTMAX - _REDUCTIONS),
    ("Reshape", RESHAPES - {"Identity"}),
    (
        "normalization",
        NORMS | {"BatchNormalization", "LpNormalization"},
    ),
    ("reduction", _REDUCTIONS),
    ("Transpose", frozenset({"Transpose"})),
)
"""Operators that are tried in FP32 together, those first that more networks gained by."""


def groups(trials: Trials, goal: Goal) -> Iterator[list[Group]]:
    """Yields batches of groups to try, each group with a plan of its own, most promising first.

    With a budget, the groups that fill it by the estimate come first. With a tolerance the rules' FP32 nodes
    back in FP16, and BF16 for FP32, come first, as both may be faster. No other goal tries them
    (docs/plans.md).

    What goes to FP32 by its kind needs no emulation. The search's emulation ranks all nodes, once, unless
    that takes too long; it does so before the first of these batches, for time that is up then is lost. What
    is estimated to cost more than the goal allows comes last.

    Raises:
        ArithmeticRunError: ONNX Runtime cannot run the model.
    """
    plan = trials.plan
    new = partial(_new, trials=trials, seen={(plan.fp32, plan.bf16)})
    if isinstance(goal, ErrorLimit):
        yield new(chain(_released(trials), _in_bf16(trials)))
    ranked = _ranking(trials)
    if isinstance(goal, Budget) and ranked:
        yield new(_filling(trials, goal))
    survey = trials.problem.survey(plan)
    by_kind = chain(_resizes(survey, trials), _kinds(survey, trials))
    kept = new(chain(by_kind, _ranked(survey, ranked)))
    yield sorted(kept, key=partial(_too_dear, trials=trials, goal=goal))


def _new(found: Iterable[Group], trials: Trials, seen: set[Types]) -> list[Group]:
    """Those whose plan was not seen before."""
    kept = []
    for group in found:
        made = trials.plan_of(group.candidate)
        if (types := (made.fp32, made.bf16)) not in seen:
            seen.add(types)
            kept.append(group)
    return kept


def _too_dear(group: Group, trials: Trials, goal: Goal) -> bool:
    """True if even a cheap engine should be slower than the goal allows."""
    if isinstance(goal, ErrorLimit):
        return False
    share = goal.share if isinstance(goal, Budget) else 0.0
    limit = (1.0 + share) * (1.0 + ESTIMATE_OFF)
    return trials.latency_us(group.candidate) > limit * trials.latency_us(Candidate())


def _filling(trials: Trials, goal: Budget) -> Iterator[Group]:
    """The residual streams; what fills shares of the budget, without norms that take epilogues, and with."""
    base = trials.latency_us(Candidate())
    yield _streams(trials)
    rows = [(norms, trials.useful_nodes(norms=norms)) for norms in (False, True)]
    for times in BUDGETS:
        for norms, ranked in rows:
            row = row_within(trials, ranked, base * (1.0 + times * goal.share))
            words = f"{times * goal.share:.3g} more latency by the estimate"
            yield Group(f"{words}, norms too" if norms else words, row)


def _released(trials: Trials) -> Iterator[Group]:
    """Each rule that is about accuracy, back in FP16; those first that should cost nothing, and may."""
    rules: dict[str, list[str]] = {}
    for decision in trials.plan.decisions:
        if decision.rule in FOR_ACCURACY:
            rules.setdefault(decision.rule, []).append(decision.key)
    for rule, keys in sorted(rules.items(), key=lambda pair: pair[0] not in free_fp32.FREE):
        yield Group(f"{rule} back in FP16 ({len(keys)})", Candidate(released=frozenset(keys)))


def _ranking(trials: Trials) -> list[str]:
    """The nodes by what FP32 gains there; none if the time for it was up."""
    if time.monotonic() >= trials.ranked_by:
        return []
    try:
        return trials.ranking()
    except TimeUpError:
        return []


def _resizes(survey: Survey, trials: Trials) -> Iterator[Group]:
    """Each Resize with the views that lead to it."""
    resizes = [node for node in survey.nodes if node.op_type in RESIZES]
    views = [node for r in resizes for node in survey.upstream(r.input[0], lambda n: n.op_type in VIEWS)]
    ends = set(map(id, resizes))
    nearest = [node for node in views if any(id(reader) in ends for reader in _readers(survey, node))]
    for name, more in (("the view before it", nearest), ("all views before it", views)):
        if more:
            yield _in_fp32(f"Resize and {name}", survey, trials, [*resizes, *more])


def _kinds(survey: Survey, trials: Trials) -> Iterator[Group]:
    for name, operators in KINDS:
        yield _in_fp32(name, survey, trials, (n for n in survey.nodes if n.op_type in operators))
    yield _streams(trials)
    yield from _attention(survey, trials)
    beside = (n for n in survey.nodes if n.op_type in VIEWS and _beside_conv(survey, n))
    yield _in_fp32("views beside Conv", survey, trials, beside)


def _streams(trials: Trials) -> Group:
    keys = trials.streams()
    return Group(f"residual sums and activations in FP32 ({len(keys)})", added(keys))


def _beside_conv(survey: Survey, node: NodeProto) -> bool:
    producers = (survey.producer(tensor) for tensor in node.input if survey.is_float(tensor))
    around = chain((p for p in producers if p is not None), _readers(survey, node))
    return any(other.op_type in CONVOLUTIONS for other in around)


def _readers(survey: Survey, node: NodeProto) -> Iterator[NodeProto]:
    for tensor in node.output:
        yield from (reader for _, reader in survey.readers(tensor))


def _attention(survey: Survey, trials: Trials) -> Iterator[Group]:
    """Products of two computed tensors and Softmax, as one group: FP32 costs their fused kernel."""
    inner = [n for n in survey.nodes if n.op_type == "MatMul" and not any(map(survey.is_constant, n.input))]
    softmax = [n for n in survey.nodes if n.op_type in SOFTMAX]
    if inner and softmax:
        yield _in_fp32("attention", survey, trials, [*inner, *softmax])


def _ranked(survey: Survey, ranked: Sequence[str]) -> Iterator[Group]:
    """The Convs, the MatMuls with a weight, and the other nodes whose error falls most for their cost."""
    for name, operators in (("Conv", CONVOLUTIONS), ("MatMul", PRODUCTS)):
        weighted = {
            node_key(survey.scope, n)
            for n in survey.nodes
            if n.op_type in operators and any(map(survey.is_constant, n.input))
        }
        yield from _rows(name, [key for key in ranked if key in weighted])
    matrix = {node_key(survey.scope, n) for n in survey.nodes if n.op_type in COMPUTE_BOUND}
    yield from _rows("other node", [key for key in ranked if key not in matrix])


def _rows(name: str, ranked: Sequence[str]) -> Iterator[Group]:
    for size in SIZES:
        keys = ranked[:size]
        if len(keys) == size or (keys and size == SIZES[0]):
            plural = "" if len(keys) == 1 else "s"
            yield Group(f"best {len(keys)} {name}{plural} in FP32", added(keys))


def _in_bf16(trials: Trials) -> Iterator[Group]:
    """Matrix products that are in FP32 for their range."""
    keys = in_range_products(trials, Candidate())
    yield Group(f"FP32 products in BF16 ({len(keys)})", Candidate(bf16=frozenset(keys)))


def _in_fp32(name: str, survey: Survey, trials: Trials, nodes: Iterable[NodeProto]) -> Group:
    kept = trials.plan.fp32 | trials.plan.bf16
    keys = frozenset(node_key(survey.scope, node) for node in nodes) - kept
    return Group(f"{name} in FP32 ({len(keys)})", added(keys))
