"""The most accurate plan within a budget of latency."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, zip_longest

from rewriter.jobs.search.effort import MOST
from rewriter.jobs.search.goal import Budget, Found
from rewriter.jobs.search.trials import Candidate, Trials, added, bisect

LEAST_GAIN, MOST_GAIN = 0.1, 0.5
"""Limits on the share of a cheaper plan's error that a plan must save: the share of latency that it adds, but
at least the difference of emulated and measured errors, and at most a half.
Nobody wants an RT-DETR that errs 10 % less for 20 % more latency."""

MOST_OF_BUDGET = 1 / 3
"""Largest share of a budget for one node in the sequence of cheap nodes: a Conv of a ResNet that costs half
of the budget gains less than the nodes that fit in its place."""


def most_accurate(trials: Trials, budget: Budget, most: int = MOST) -> Found:
    """Puts as many of the best-ranked nodes in FP32 as the budget allows, or fewer if they err less.

    Several sequences of nodes are tried (`_sequences`). Bisection of the latency finds the longest start of a
    sequence within the budget; later nodes that still fit are added. This plan, the whole sequence, and a
    half, a quarter, ... of the start are evaluated if they are within the budget: `most` plans in all,
    including the rules' plan.

    In order of latency, a plan that is enough better than the best so far (`LEAST_GAIN`) takes its place. If
    there is none, the rules' plan is kept.

    Raises:
        ArithmeticRunError: ONNX Runtime cannot run the model.
    """
    rules, base = Candidate(), trials.latency_us(Candidate())
    limit = base * (1.0 + budget.share)
    sequences = list(_sequences(trials, base * budget.share))
    turns = zip_longest(*(_shorter(trials, keys, limit) for keys in sequences))
    candidates = [candidate for turn in turns for candidate in turn if candidate is not None]
    within = (candidate for candidate in candidates if trials.latency_us(candidate) <= limit)
    tried, best = list(islice(trials.different(within, {trials.types(rules)}), most - 1)), rules
    for candidate in sorted(tried, key=trials.latency_us):
        if _gains(trials, candidate, best):
            best = candidate
    sign = -1.0 if trials.metric.least else 1.0
    closest = min([rules, *tried], key=lambda candidate: sign * trials.value(candidate))
    refused = trials.value(closest) if best == rules != closest else None
    return trials.found(budget, best, refused=refused)


def _sequences(trials: Trials, budget_us: float) -> Iterator[list[str]]:
    """Yields sequences of nodes, best first, of which a plan takes the start.

    These are the useful nodes, the residual streams alone, the useful nodes that are cheap, and the streams
    before all other nodes. If the ranking has FP16 sums, also the useful nodes with norms that take an
    epilogue's sums.
    """
    ranked, streams = trials.useful_nodes(), trials.streams()
    yield ranked
    yield streams
    yield [key for key in ranked if trials.prices.extra[key] <= MOST_OF_BUDGET * budget_us]
    yield list(dict.fromkeys((*streams, *ranked)))
    if trials.problem.ranking_sums == "fp16":
        yield trials.useful_nodes(norms=True)


def _filling(trials: Trials, ranked: Sequence[str], limit_us: float) -> Candidate:
    """Puts as many of the best nodes in FP32 as an estimated latency allows, and later ones that fit."""
    chosen = list(ranked[: _longest(trials, ranked, limit_us)])
    left = limit_us - trials.latency_us(added(chosen))
    for key in ranked[len(chosen) :]:
        extra = trials.prices.extra[key]
        if extra <= left:
            chosen.append(key)
            left -= extra
    return added(chosen)


def _shorter(trials: Trials, ranked: Sequence[str], limit_us: float) -> Iterator[Candidate]:
    """Yields all nodes, those that fill the budget, the longest start, and a half, a quarter, ... of it.

    All nodes may cost less than a part of them, which needs Casts and splits kernels.
    """
    yield added(ranked)
    yield _filling(trials, ranked, limit_us)
    longest = _longest(trials, ranked, limit_us)
    while longest:
        yield added(ranked[:longest])
        longest //= 2


def _gains(trials: Trials, candidate: Candidate, other: Candidate) -> bool:
    """True if a candidate is worth its latency; for a metric of which more is better, if it is better."""
    if trials.metric.least:
        return trials.value(candidate) > trials.value(other)
    cost = (trials.latency_us(candidate) - trials.latency_us(other)) / trials.latency_us(Candidate())
    least = min(MOST_GAIN, max(LEAST_GAIN, cost))
    return trials.value(candidate) <= (1.0 - least) * trials.value(other)


def _longest(trials: Trials, ranked: Sequence[str], limit_us: float) -> int:
    """Returns how many of the best nodes cost no more than the limit together."""
    return bisect(len(ranked) + 1, lambda count: trials.latency_us(added(ranked[:count])) > limit_us) - 1
