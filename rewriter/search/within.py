"""The most accurate plan within a budget of latency."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, zip_longest

from rewriter.search.candidate import Candidate, added
from rewriter.search.effort import MOST
from rewriter.search.goal import Budget, Found
from rewriter.search.trials import Trials

LEAST_GAIN, MOST_GAIN = 0.1, 0.5
"""Share of a cheaper plan's error that a plan must save to be worth its latency: the share of latency that it
costs on top, but no less than what emulated and measured errors differ by (benchmarks/side_by_side.md), and
no more than a half. An RT-DETR that errs 10 % less for 20 % more latency is not what a user asks for."""

MOST_OF_BUDGET = 1 / 3
"""Share of a budget that a node may take in a row of small ones: a Conv of a ResNet that takes half of it
gains less than what fits in its place."""


def most_accurate(trials: Trials, budget: Budget, most: int = MOST) -> Found:
    """As many of the best-ranked nodes in FP32 as the budget allows, or fewer where that is more accurate.

    The longest row of the candidates within the budget is found by bisection of the latency; then nodes
    further down that still fit are added. All candidates, this plan, and those with a half, a quarter, ... of
    its nodes are evaluated where they are within the budget, `most` plans in all with the rules' one. So are
    those of other rows (`_rows`).

    From the cheapest to the dearest, each that is enough better than the best so far (`LEAST_GAIN`) takes
    its place: where that is none, the rules' plan is kept.

    Raises:
        ArithmeticRunError: ONNX Runtime cannot run the model.
    """
    rules = Candidate()
    before, base = trials.value(rules), trials.latency_us(rules)
    limit = base * (1.0 + budget.share)
    rows = list(_rows(trials, base * budget.share))
    turns = zip_longest(*(_shorter(trials, row, limit) for row in rows))
    candidates = [candidate for turn in turns for candidate in turn if candidate is not None]
    within = (candidate for candidate in candidates if trials.latency_us(candidate) <= limit)
    tried, best = list(islice(_unlike(trials, within), most - 1)), rules
    for candidate in sorted(tried, key=trials.latency_us):
        if _gains(trials, candidate, best):
            best = candidate
    closest = min([rules, *tried], key=lambda candidate: _error(trials, candidate))
    refused = trials.value(closest) if best == rules != closest else None
    cost, value = trials.latency_us(best) - base, trials.value(best)
    origin, plan = trials.judge.origin, trials.plan_of(best)
    return Found(plan, True, value, before, None, trials.count, cost, base, budget, origin, refused=refused)


def _rows(trials: Trials, budget_us: float) -> Iterator[list[str]]:
    """The candidates; the residual streams alone; the candidates without those that leave little to others.

    Then the streams before all other candidates, and where the ranking has FP16 sums, the candidates with
    norms that take an epilogue's sums.
    """
    ranked, streams = trials.useful_nodes(), trials.streams()
    yield ranked
    yield streams
    yield [key for key in ranked if trials.prices.extra[key] <= MOST_OF_BUDGET * budget_us]
    yield list(dict.fromkeys((*streams, *ranked)))
    if trials.ranks_fp16_sums:
        yield trials.useful_nodes(norms=True)


def row_within(trials: Trials, ranked: Sequence[str], limit_us: float) -> Candidate:
    """As many of the best nodes in FP32 as an estimated latency allows, and those further down that fit."""
    return added(_filled(trials, ranked, _longest(trials, ranked, limit_us), limit_us))


def _unlike(trials: Trials, candidates: Iterable[Candidate]) -> Iterator[Candidate]:
    """Yields candidates whose plans differ from the rules' plan and from those before them."""
    seen = {(trials.plan.fp32, trials.plan.bf16)}
    for candidate in candidates:
        plan = trials.plan_of(candidate)
        if (types := (plan.fp32, plan.bf16)) not in seen:
            seen.add(types)
            yield candidate


def _shorter(trials: Trials, ranked: Sequence[str], limit_us: float) -> Iterator[Candidate]:
    """All of them, the row that fills the budget, the longest without gaps, and a half, a quarter, ... of it.

    All may cost less than a part: there are no Casts then, and no kernel is split.
    """
    yield added(ranked)
    longest = _longest(trials, ranked, limit_us)
    yield added(_filled(trials, ranked, longest, limit_us))
    while longest:
        yield added(ranked[:longest])
        longest //= 2


def _gains(trials: Trials, candidate: Candidate, other: Candidate) -> bool:
    """True if a candidate is worth its latency; for a metric that should be large, if it is better."""
    if trials.metric.least:
        return trials.value(candidate) > trials.value(other)
    dearer = (trials.latency_us(candidate) - trials.latency_us(other)) / trials.latency_us(Candidate())
    least = min(MOST_GAIN, max(LEAST_GAIN, dearer))
    return trials.value(candidate) <= (1.0 - least) * trials.value(other)


def _error(trials: Trials, candidate: Candidate) -> float:
    """The metric, turned so that less is better."""
    value = trials.value(candidate)
    return -value if trials.metric.least else value


def _longest(trials: Trials, ranked: Sequence[str], limit_us: float) -> int:
    """How many of the best nodes cost no more than that."""
    low, high = 0, len(ranked) + 1
    while high - low > 1:
        middle = (low + high) // 2
        within = trials.latency_us(added(ranked[:middle])) <= limit_us
        low, high = (middle, high) if within else (low, middle)
    return low


def _filled(trials: Trials, ranked: Sequence[str], longest: int, limit_us: float) -> list[str]:
    """Returns the longest row and the later nodes that still fit, each at its own price."""
    chosen = list(ranked[:longest])
    left = limit_us - trials.latency_us(added(chosen))
    for key in ranked[longest:]:
        extra = trials.prices.extra[key]
        if extra <= left:
            chosen.append(key)
            left -= extra
    return chosen
