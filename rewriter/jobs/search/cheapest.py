"""The cheapest plan that meets a tolerance.

Nodes are ranked by the squared error that each adds (`divergence`) over its estimated cost in FP32. Nodes
that make engines worse in FP32 (`node_sets`) come last. Bisection finds how many of the best nodes are
needed. Of these, halves, quarters, ... that are not needed go back to FP16, most expensive first. In the same
way matrix products in FP32 go to BF16, and nodes that rules keep for accuracy go back to FP16. That costs
O(k log n) evaluations.

Some nodes stay in FP32 whatever was measured: they could be infinite, NaN or zero on other data (overflow, a
mask, an epsilon, a norm's squares, partial sums), have no lower type, or were named by the user.

A search that takes the first plan and cannot meet the tolerance comes close to all nodes in FP32 instead: the
caller judges the plan by other measures, too.

A plan with most matrix products in FP32 defeats reduced precision. If rounding their weights alone breaks the
tolerance, no cheaper plan meets it: the search reports that with the number. It also evaluates this if all
nodes in FP32 are not enough, since FP32 products are TF32 on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from onnx import NodeProto

from rewriter.hazards.planning.planner import SEARCHED, has_bf16
from rewriter.ir.graph.ops import COMPUTE_BOUND, TENSOR_CORE
from rewriter.ir.model import opsets_of
from rewriter.ir.plan import node_key
from rewriter.jobs.search.goal import ErrorLimit, Found
from rewriter.jobs.search.trials import Candidate, Trials, added, bisect
from rewriter.judge.arithmetic_checks import AS_FP32

RELEASABLE = frozenset(
    {"accumulation", "coordinates", "integers", "order", "phase", "positions", "underflow"}
)
"""Rules about accuracy: FP16 adds rounding errors to their nodes, which samples show."""

LEAST_SAVING = 1e-3
"""Share of the latency that releasing a node must save: less is not worth the risk."""

IN_BF16 = TENSOR_CORE
"""Operators that are cheaper in BF16: a MatMul is as fast as in FP16 (one H200, TensorRT-RTX 1.6.1)."""

FOR_RANGE = frozenset({"overflow", "partial-sums", "weights", SEARCHED})
"""Rules whose nodes BF16 repairs, too: it has FP32's range and accumulates in FP32."""

MOST_PRODUCTS = 0.5
"""Share of the matrix products' time in FP32 above which rounding the weights alone is evaluated."""

Move = Callable[[Candidate, frozenset[str]], Candidate]


def cheapest(trials: Trials, goal: ErrorLimit) -> Found:
    """Searches from the rules' plan.

    Raises:
        ArithmeticRunError: ONNX Runtime cannot run the model.
    """
    rules = Candidate()
    if goal.meets(trials.value(rules)):
        return trials.found(goal, _cheaper(trials, goal, rules))
    ranked = trials.all_nodes()
    needed = _bisect(ranked, trials, goal)
    if needed is None:
        best = trials.value(added(ranked))
        if goal.first_found:
            close = replace(goal, tolerance=AS_FP32 * best)  # as few nodes as come close to all of them
            return trials.found(goal, added(ranked[: _bisect(ranked, trials, close) or 0]), met=False)
        return replace(trials.found(goal, rules, met=False, weights=trials.weights_alone()), value=best)
    kept = ranked[:needed]
    if goal.first_found:
        return trials.found(goal, added(kept))
    candidate = _halving(
        trials, goal, added(kept), kept, lambda c, keys: replace(c, added=c.added - keys), len(kept) // 2
    )
    weights = trials.weights_alone() if _products_share(trials, candidate) > MOST_PRODUCTS else None
    if weights is not None and not goal.meets(weights):
        return trials.found(goal, rules, met=False, weights=weights)
    return trials.found(goal, _cheaper(trials, goal, candidate), weights=weights)


def _products_share(trials: Trials, candidate: Candidate) -> float:
    """Returns the share of the matrix products' time that is spent in FP32."""
    base = trials.prices.base
    nodes = trials.problem.model.proto.graph.node
    products = {node_key(0, n) for n in nodes if n.op_type in COMPUTE_BOUND} & base.keys()
    total = sum(base[key] for key in products)
    return sum(base[key] for key in products & trials.plan_of(candidate).fp32) / total if total else 0.0


def _bisect(ranked: Sequence[str], trials: Trials, goal: ErrorLimit) -> int | None:
    """Returns how many of the best nodes are needed; None if all are not enough."""
    if not goal.meets(trials.value(added(ranked))):
        return None
    return bisect(len(ranked), lambda count: goal.meets(trials.value(added(ranked[:count]))))


def _cheaper(trials: Trials, goal: ErrorLimit, candidate: Candidate) -> Candidate:
    """Moves products to BF16, and releases nodes, as long as the goal is met."""
    products, release = _in_range_products(trials, candidate), _releasable(trials)
    candidate = _halving(
        trials, goal, candidate, products, lambda c, keys: replace(c, bf16=c.bf16 | keys), len(products)
    )
    return _halving(
        trials, goal, candidate, release, lambda c, keys: replace(c, released=c.released | keys), len(release)
    )


def _halving(
    trials: Trials, goal: ErrorLimit, candidate: Candidate, keys: Sequence[str], move: Move, size: int
) -> Candidate:
    """Moves all, halves, quarters, ... of the nodes, most expensive first, as long as the goal is met."""
    left = sorted(keys, key=lambda key: -trials.prices.extra.get(key, 0.0))
    budget, start = 2 * math.ceil(math.log2(len(trials.prices.extra) + 1)), 0
    while size and budget > 0 and left:
        moved = move(candidate, frozenset(left[start : start + size]))
        budget -= 1
        if goal.meets(trials.value(moved)):
            candidate, left = moved, [*left[:start], *left[start + size :]]
        else:
            start += size
        if start >= len(left):
            start, size = 0, size // 2
    return candidate


def _in_range_products(trials: Trials, candidate: Candidate) -> list[str]:
    """Returns the matrix products in FP32 whose hazard BF16 repairs, if their operator supports BF16."""
    proto = trials.problem.model.proto
    opsets = opsets_of(proto)
    nodes: dict[str, NodeProto] = {node_key(0, n): n for n in proto.graph.node if n.op_type in IN_BF16}
    plan = trials.plan_of(candidate)
    kept = [d.key for d in plan.decisions if d.repair == "fp32" and d.rule in FOR_RANGE and d.key in nodes]
    return [key for key in kept if plan.precision == "fp16" and has_bf16(nodes[key], opsets)]


def _releasable(trials: Trials) -> list[str]:
    least = LEAST_SAVING * trials.latency_us(Candidate())
    extra = trials.prices.extra
    return [d.key for d in trials.plan.decisions if d.rule in RELEASABLE and extra.get(d.key, 0.0) > least]
