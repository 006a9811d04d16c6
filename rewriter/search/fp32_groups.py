"""Groups of nodes that a search on an engine tries in FP32: nodes of one operator, one place, or best-ranked.

There are too many single nodes to build, and an engine seldom gains by one. On an H200 a SegFormer was 1.10
times faster with four Resizes and nine Reshapes in FP32, which broke a slow fusion. No estimate shows that.
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
from rewriter.planning.planner import node_key
from rewriter.search.candidate import Candidate, Group, added
from rewriter.search.cheapest import in_range_products
from rewriter.search.goal import Budget, ErrorLimit, Goal
from rewriter.search.trials import Trials, Types, types_of
from rewriter.search.within import filling

ESTIMATE_OFF = 0.12
"""Error of an estimated latency relative to the rules' plan, for nine plans of ten
(docs/plans.md#a-budget-and-the-frontier)."""

SIZES = (2, 8, 32)
"""Numbers of best-ranked nodes of a kind that are tried in FP32."""

BUDGETS = (1.0, 0.5, 2.0, 0.25)
"""Shares of a budget that the best-ranked nodes fill by the estimate, in order of trial. Plans estimated at
10 % cost 3 to 23 % on an H200 (UNet and NAFNet, benchmarks/side_by_side.md)."""

_REDUCTIONS = REDUCTIONS | {"GlobalAveragePool", "AveragePool"}

KINDS: tuple[tuple[str, frozenset[str]], ...] = (
    ("Resize", RESIZES),
    ("Softmax", SOFTMAX),
    ("elementwise", CHEAP - VIEWS - SOFTMAX - _REDUCTIONS),
    ("Reshape", RESHAPES - {"Identity"}),
    ("normalization", NORMS | {"BatchNormalization", "LpNormalization"}),
    ("reduction", _REDUCTIONS),
    ("Transpose", frozenset({"Transpose"})),
)
"""Operators that are tried in FP32 together; those that helped more networks come first."""


def groups(trials: Trials, goal: Goal) -> Iterator[list[Group]]:
    """Yields batches of groups to try, each group with a plan of its own, most promising first.

    With a tolerance, BF16 for FP32 products comes first, which may be faster. With a budget, groups that fill
    it by the estimate come first. Groups that are estimated to cost more than the goal allows come last.

    One emulation ranks the nodes, unless it takes too long. It runs before the groups that need no ranking
    are tried, because later there may be no time for it.

    Raises:
        ArithmeticRunError: ONNX Runtime cannot run the model.
    """
    new = partial(_new, trials=trials, seen={types_of(trials.plan)})
    if isinstance(goal, ErrorLimit):
        yield new([_in_bf16(trials)])
    ranked = _ranking(trials)
    if isinstance(goal, Budget) and ranked:
        yield new(_filling(trials, goal))
    survey = trials.problem.survey(trials.plan)
    by_kind = chain(_resizes(survey, trials), _kinds(survey, trials))
    kept = new(chain(by_kind, _ranked(survey, ranked)))
    yield sorted(kept, key=partial(_exceeds, trials=trials, goal=goal))


def _new(found: Iterable[Group], trials: Trials, seen: set[Types]) -> list[Group]:
    """Returns the groups whose plans differ from each other and from those in `seen`."""
    by_candidate: dict[Candidate, Group] = {}
    for group in found:
        by_candidate.setdefault(group.candidate, group)
    return [by_candidate[candidate] for candidate in trials.different(by_candidate, seen)]


def _exceeds(group: Group, trials: Trials, goal: Goal) -> bool:
    """True if the plan exceeds the goal's latency even if the estimate is too high by `ESTIMATE_OFF`."""
    if isinstance(goal, ErrorLimit):
        return False
    share = goal.share if isinstance(goal, Budget) else 0.0
    limit = (1.0 + share) * (1.0 + ESTIMATE_OFF)
    return trials.latency_us(group.candidate) > limit * trials.latency_us(Candidate())


def _filling(trials: Trials, goal: Budget) -> Iterator[Group]:
    """Yields the residual streams, then plans that fill shares of the budget, without norms and with them."""
    base = trials.latency_us(Candidate())
    yield _streams(trials)
    sequences = [(norms, trials.useful_nodes(norms=norms)) for norms in (False, True)]
    for share in (times * goal.share for times in BUDGETS):
        for norms, ranked in sequences:
            words = f"{share:.3g} more latency by the estimate"
            candidate = filling(trials, ranked, base * (1.0 + share))
            yield Group(f"{words}, norms too" if norms else words, candidate)


def _ranking(trials: Trials) -> list[str]:
    """Returns the ranking of the nodes; nothing if there is no time for it."""
    if time.monotonic() >= trials.ranked_by:
        return []
    try:
        return trials.ranking()
    except TimeUpError:
        return []


def _resizes(survey: Survey, trials: Trials) -> Iterator[Group]:
    """Yields all Resizes with the views before them."""
    resizes = [node for node in survey.nodes if node.op_type in RESIZES]
    views = [node for r in resizes for node in survey.upstream(r.input[0], lambda n: n.op_type in VIEWS)]
    ends = set(map(id, resizes))
    nearest = [node for node in views if any(id(consumer) in ends for consumer in _consumers(survey, node))]
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
    around = chain((p for p in producers if p is not None), _consumers(survey, node))
    return any(other.op_type in CONVOLUTIONS for other in around)


def _consumers(survey: Survey, node: NodeProto) -> Iterator[NodeProto]:
    return (consumer for tensor in node.output for _, consumer in survey.readers(tensor))


def _attention(survey: Survey, trials: Trials) -> Iterator[Group]:
    """Yields products of two computed tensors and Softmax as one group: FP32 breaks their fused kernel."""
    inner = [n for n in survey.nodes if n.op_type == "MatMul" and not any(map(survey.is_constant, n.input))]
    softmax = [n for n in survey.nodes if n.op_type in SOFTMAX]
    if inner and softmax:
        yield _in_fp32("attention", survey, trials, [*inner, *softmax])


def _ranked(survey: Survey, ranked: Sequence[str]) -> Iterator[Group]:
    """Yields the best-ranked Convs, MatMuls with a weight, and other nodes."""
    for name, operators in (("Conv", CONVOLUTIONS), ("MatMul", PRODUCTS)):
        weighted = {
            node_key(survey.scope, n)
            for n in survey.nodes
            if n.op_type in operators and any(map(survey.is_constant, n.input))
        }
        yield from _best(name, [key for key in ranked if key in weighted])
    matrix = {node_key(survey.scope, n) for n in survey.nodes if n.op_type in COMPUTE_BOUND}
    yield from _best("other node", [key for key in ranked if key not in matrix])


def _best(name: str, ranked: Sequence[str]) -> Iterator[Group]:
    for size in SIZES:
        keys = ranked[:size]
        if len(keys) == size or (keys and size == SIZES[0]):
            plural = "" if len(keys) == 1 else "s"
            yield Group(f"best {len(keys)} {name}{plural} in FP32", added(keys))


def _in_bf16(trials: Trials) -> Group:
    """Returns the matrix products that are in FP32 for their range."""
    keys = in_range_products(trials, Candidate())
    return Group(f"FP32 products in BF16 ({len(keys)})", Candidate(bf16=frozenset(keys)))


def _in_fp32(name: str, survey: Survey, trials: Trials, nodes: Iterable[NodeProto]) -> Group:
    kept = trials.plan.fp32 | trials.plan.bf16
    keys = frozenset(node_key(survey.scope, node) for node in nodes) - kept
    return Group(f"{name} in FP32 ({len(keys)})", added(keys))
