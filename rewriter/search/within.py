"""The most accurate plan within a budget of latency."""

from __future__ import annotations

from collections.abc import Sequence

from rewriter.search.choice import Choice, added
from rewriter.search.effort import MOST
from rewriter.search.goal import Budget, Found
from rewriter.search.trials import Trials


def most_accurate(trials: Trials, budget: Budget, most: int = MOST) -> Found:
    """As many of the best-ranked nodes in FP32 as the budget allows, or fewer where that is more accurate.

    The longest row of the ranking within the budget is found by bisection of the latency; then nodes
    further down that still fit are added. This plan, and those with a half, a quarter, ... of its nodes,
    are evaluated, `most` plans in all with the rules' one.

    Raises:
        ArithmeticRunError: ONNX Runtime cannot run the model.
    """
    rules = Choice()
    before, base = trials.value(rules), trials.latency_us(rules)
    limit = base * (1.0 + budget.share)
    ranked = trials.ranking()
    longest = _longest(trials, ranked, limit)
    choices = [added(_filled(trials, ranked, longest, limit))]
    while longest:
        choices.append(added(ranked[:longest]))
        longest //= 2
    within = [choice for choice in choices if trials.latency_us(choice) <= limit]
    best = min([rules, *within[: most - 1]], key=lambda c: (_error(trials, c), trials.latency_us(c)))
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


def _filled(trials: Trials, ranked: Sequence[str], longest: int, limit_us: float) -> list[str]:
    """The longest row, and those of the nodes behind it that fit, too, each at its price alone."""
    chosen = list(ranked[:longest])
    left = limit_us - trials.latency_us(added(chosen))
    for key in ranked[longest:]:
        extra = trials.prices.extra[key]
        if extra <= left:
            chosen.append(key)
            left -= extra
    return chosen
