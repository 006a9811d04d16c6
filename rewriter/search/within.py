"""The most accurate plan within a budget of latency."""

from __future__ import annotations

from collections.abc import Sequence

from rewriter.search.goal import Budget, Found
from rewriter.search.trials import Choice, Trials, added


def most_accurate(trials: Trials, budget: Budget) -> Found:
    """As many of the best-ranked nodes in FP32 as the budget allows, or fewer where that is more accurate.

    The longest row of the ranking within the budget is found by bisection of the latency; then nodes
    further down that still fit are added. This plan, and those with a half, a quarter, ... of its nodes,
    are evaluated: O(log n) evaluations.

    Raises:
        ArithmeticRunError: ONNX Runtime cannot run the model.
    """
    rules = Choice()
    before, base = trials.value(rules), trials.latency_us(rules)
    ranked = trials.ranking()
    longest = _longest(trials, ranked, base * (1.0 + budget.share))
    choices = [rules, added(_filled(trials, ranked, longest, base * budget.share))]
    while longest:
        choices.append(added(ranked[:longest]))
        longest //= 2
    best = min(
        (c for c in choices if trials.latency_us(c) <= base * (1.0 + budget.share)),
        key=lambda c: (_error(trials, c), trials.latency_us(c)),
    )
    cost, value = trials.latency_us(best) - base, trials.value(best)
    origin, plan = trials.judge.origin, trials.plan_of(best)
    return Found(plan, True, value, before, None, trials.count, cost, base, budget, origin)


def _error(trials: Trials, choice: Choice) -> float:
    """The metric, turned so that less is better."""
    value = trials.value(choice)
    return -value if trials.metric.least else value


def _longest(trials: Trials, ranked: Sequence[str], limit_us: float) -> int:
    """How many of the best nodes cost no more than that."""
    low, high = 0, len(ranked) + 1
    while high - low > 1:
        middle = (low + high) // 2
        within = trials.latency_us(added(ranked[:middle])) <= limit_us
        low, high = (middle, high) if within else (low, middle)
    return low


def _filled(trials: Trials, ranked: Sequence[str], longest: int, left_us: float) -> list[str]:
    """The longest row, and what fits of the nodes behind it by its recorded cost."""
    extra = trials.prices.extra
    chosen = list(ranked[:longest])
    left_us -= sum(extra[key] for key in chosen)
    for key in ranked[longest:]:
        if extra[key] <= left_us:
            chosen.append(key)
            left_us -= extra[key]
    return chosen
