"""Searches for plans from the rules' plan: the cheapest within a tolerance, the most accurate in a budget.

Candidates are evaluated by emulation and recorded costs. Nodes are ranked by the squared error of the outputs
that each causes (`contributions`) over its estimated cost in FP32.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, zip_longest

import numpy as np

from rewriter.base.sandbox import processor_s
from rewriter.base.stopwatch import OutOfTimeError, within
from rewriter.ir.model import Array, Model
from rewriter.ir.plan import NodePatterns, Plan
from rewriter.jobs.search.effort import MOST, Effort, RunCost, affordable
from rewriter.jobs.search.goal import NOISE, Budget, ErrorLimit, Found, Goal
from rewriter.jobs.search.trials import LEAST_US, AddedNodes, Memory, Trials, bisect, halfway
from rewriter.passes.base import Context
from rewriter.runtime.emulation import Accumulation, emulation, reference
from rewriter.runtime.metrics.metrics import DETECTIONS, by_parts
from rewriter.runtime.metrics.parts import Parts, parts_of
from rewriter.runtime.metrics.probabilities import probabilities
from rewriter.runtime.metrics.tolerances import RELATIVE_L2, TOLERANCES
from rewriter.target import Target
from rewriter.verification.arithmetic_checks import AS_FP32
from rewriter.verification.expected import run_all, selected_axes, with_states

SAMPLES = 4
"""Samples that each plan is compared on, at most."""

LEAST_GAIN, MOST_GAIN = 0.1, 0.5
"""Limits on the share of a cheaper plan's error that a plan must save: the share of latency that it adds, but
at least the difference of emulated and measured errors, and at most a half.
An RT-DETR with 10 % less error is not worth 20 % more latency."""

ENOUGH = 8
"""Emulations from which a bisection ends where the nodes in question cost less than two runs differ by."""

NEAR_FP32 = 1.25
"""Largest limit, in units of FP32's error, at which only the ranking decides: such a network amplifies
rounding. The start of a LeViT that met the limit on three samples had 2.8 times FP32's error on a fourth."""

DOUBT = 1.25
"""Largest ratio of two foretold errors at which the plan with the larger one is emulated, too."""

SPREAD = 0.1
"""Share of latency that the ranking's plan adds from which other rankings are tried, too."""

MOST_SHARE = 1e30
"""Keeps sums of shares finite where a node adds an infinite error."""


def search(
    original: Model,
    structured: Model,
    samples: Iterable[Mapping[str, Array]],
    plan: Plan,
    goal: Goal,
    accumulation: Accumulation,
    target: Target,
    means_of: Context | None,
    deadline: float = math.inf,
    parts: Parts | None = None,
    checked: int = 0,
    memory: Memory | None = None,
    known: Sequence[Mapping[str, Array]] = (),
    lower: NodePatterns | None = None,
) -> tuple[Found, tuple[str, ...]]:
    """Searches from the rules' plan of a model.

    Args:
        original: The model that plans are compared with.
        samples: Feeds; of more than `SAMPLES` the first. Where the goal names its worst ones, these.
        structured: The model that `plan`, the rules' plan, is for.
        accumulation: Type of the emulated sums.
        means_of: Has the means by which weights are rounded; None: they are rounded to nearest.
        deadline: By `time.monotonic`; the search hands out its best plan in time for a check until then.
        checked: Samples that the check of a plan emulates.
        memory: Of earlier searches in `structured`.
        parts: Of the outputs, over all samples that judge; None: over the samples of the search.
        known: Outputs and final states of the original for the first samples, which it need not run again.
        lower: Nodes that stay in the lower precision.

    Returns:
        The outcome, and sentences for the user.

    Raises:
        ArithmeticRunError: ONNX Runtime cannot run the model.
        OutOfTimeError: the deadline has passed before any plan was tried.
    """
    start = time.monotonic()
    if goal.metric == RELATIVE_L2 and selected_axes(original):
        goal = replace(goal, metric=DETECTIONS)  # rows in another order differ in every element
    judged = with_states(original) if goal.metric == RELATIVE_L2 else original
    own = {port.name for port in original.signature.outputs}
    with within(deadline):
        feeds, wide, began = list(islice(samples, SAMPLES)), reference(judged), processor_s()
        effort = Effort(len(feeds), accumulation, accumulation)
        expected = [*known[:SAMPLES]] or run_all(wide, feeds[:1])
        if not goal.worst:
            cost = RunCost.of(structured, processor_s() - began)
            effort = affordable(goal, cost, len(feeds), accumulation)
        expected += run_all(wide, feeds[len(expected) : effort.samples])
        hidden = [{n: run[n] for n in run.keys() - own} for run in expected if goal.metric == RELATIVE_L2]
        expected = [{name: run[name] for name in run.keys() & own} for run in expected]
        metric = goal.measure
        limit = goal.tolerance if isinstance(goal, ErrorLimit) else TOLERANCES["fp16"].value
        if goal.metric == RELATIVE_L2:
            parts = parts_of(expected) if parts is None else parts

            def in_tf32() -> list[dict[str, Array]]:
                return run_all(emulation(reference(original), tf32=True), feeds[: len(expected)])

            metric = by_parts(expected, in_tf32, AS_FP32, limit, probabilities(original), parts)
    trials = Trials(
        structured,
        feeds[: len(expected)],
        expected,
        plan,
        metric,
        f"added by the search for {goal}",
        effort.judging_sums,
        effort.ranking_sums,
        target,
        means_of,
        hidden if any(hidden) else (),
        goal.worst or range(-1, -1 - len(expected), -1),
        memory or Memory(),
        deadline,
        checked,
        lower=lower or NodePatterns(),
    )
    result = best_in_time(trials, goal, effort.plans)
    return replace(result, seconds=time.monotonic() - start), (effort.reduced,) if effort.reduced else ()


def cheapest(trials: Trials, goal: ErrorLimit) -> Found:
    """Puts the best-ranked nodes in FP32 until a tolerance is met, by bisection.

    If they cost more than `SPREAD`, the start of the graph is tried, too, and the nodes with the largest own
    errors. Last, the end of the sequence may do without its start. Plans that are foretold to miss the
    tolerance, or to save no latency, are not emulated.

    Where the tolerance is out of reach, the plan comes close to all nodes in FP32: the caller judges it by
    other measures, too.

    Raises:
        ArithmeticRunError: ONNX Runtime cannot run the model.
    """
    # a limit that is known to be missed: the run that ranks the nodes has the outputs of the rules' plan, too
    ranked = trials.all_nodes() if goal.worst else []
    if goal.meets(trials.value(AddedNodes())):
        return trials.found(goal, AddedNodes())
    ranked, close = ranked or trials.all_nodes(), goal
    best = trials.value(AddedNodes(ranked))
    if not (met := goal.meets(best)):
        close = replace(goal, tolerance=best if goal.measure.least else AS_FP32 * best)

    def cost(keys: Sequence[str]) -> float:
        return trials.latency_us(AddedNodes(keys))

    def value(keys: Sequence[str]) -> float:
        return trials.value(AddedNodes(keys))

    def costs_latency(keys: Sequence[str]) -> bool:
        return cost(keys) > (1.0 + SPREAD) * cost([])

    foretold = not goal.measure.least
    chosen = _shortest(trials, close, ranked, foretold=foretold)
    near = foretold and goal.tolerance <= NEAR_FP32 * best
    if not near and costs_latency(chosen):  # many nodes cause the error, none much of it
        for keys in (_in_order(trials, ranked), _by_own_error(trials, ranked)):
            if costs_latency(chosen):
                cheaper = _cheaper(trials, keys, chosen)
                if cheaper and _promises(trials, cheaper, chosen) and close.meets(value(cheaper)):
                    chosen = _shortest(trials, close, cheaper)
        chosen = _without_start(trials, close, chosen)
    found = trials.found(goal, AddedNodes(chosen), met=met)
    return found if met else replace(found, value=best)


def _without_start(trials: Trials, goal: ErrorLimit, chosen: Sequence[str]) -> Sequence[str]:
    """The shortest end of the chosen nodes that meets the goal; all where it is foretold to save nothing."""
    backwards = chosen[::-1]
    fewest = bisect(len(chosen), lambda end: _promises(trials, backwards[:end], chosen))
    costs = [trials.latency_us(AddedNodes(keys)) for keys in ((), backwards[:fewest], chosen)]
    return _shortest(trials, goal, backwards) if costs[2] - costs[1] > NOISE / 2.0 * costs[0] else chosen


def _promises(trials: Trials, keys: Sequence[str], chosen: Sequence[str]) -> bool:
    """True if nodes in FP32 leave no much larger error than the chosen ones, by the shares of all others."""
    if trials.metric.least:
        return True
    left, limit = (trials.open_share(AddedNodes(added)) for added in (keys, chosen))
    return left <= DOUBT**2 * limit


def _cheaper(trials: Trials, keys: Sequence[str], chosen: Sequence[str]) -> Sequence[str]:
    """The longest start of a sequence that costs less than the chosen nodes, which needs no emulation."""

    def reaches(end: int) -> bool:
        return end == len(keys) or trials.latency_us(AddedNodes(keys[:end])) >= limit

    limit = trials.latency_us(AddedNodes(chosen))
    return keys[: bisect(len(keys), reaches) - 1]


def _shortest(
    trials: Trials, goal: ErrorLimit, keys: Sequence[str], *, foretold: bool = False
) -> Sequence[str]:
    """The shortest start of a sequence that meets the goal, which the whole does.

    Args:
        foretold: Guess how many nodes are needed from their shares of the error; squared errors add up.
    """

    def value(end: int) -> float:
        return trials.value(AddedNodes(keys[:end]))

    def enough(low: int, high: int) -> bool:
        if foretold and trials.slow:
            return cost(high) - cost(guess(low, high)) <= NOISE * cost(0)
        return trials.count >= ENOUGH and cost(high) - cost(low) <= NOISE / 2.0 * cost(0)

    def cost(end: int) -> float:
        return trials.latency_us(AddedNodes(keys[:end]))

    def guess(low: int, high: int) -> int:
        before, after = value(low) ** 2, value(high) ** 2
        if not after < before < math.inf:
            return halfway(low, high)
        sums = np.cumsum([min(trials.shares.get(key, 0.0), MOST_SHARE) for key in keys[low:high]])
        wanted = (before - goal.tolerance**2) / (before - after)
        return min(low + 1 + int(np.searchsorted(sums, wanted * sums[-1])), high - 1)

    splits = (guess, guess, halfway) if trials.slow else (guess, halfway)
    end = bisect(len(keys), lambda end: goal.meets(value(end)), enough, splits if foretold else (halfway,))
    return keys[:end]


def best_in_time(trials: Trials, goal: Goal, most: int = MOST) -> Found:
    """The outcome of the search for a goal, or when its time is up, the best of the plans that it has tried.

    Args:
        most: As for `most_accurate`.

    Raises:
        OutOfTimeError: it has tried none.
    """
    try:
        with within(trials.deadline):
            if isinstance(goal, ErrorLimit):
                return cheapest(trials, goal)
            return most_accurate(trials, goal, most)
    except OutOfTimeError:
        return _best_so_far(trials, goal)


def _best_so_far(trials: Trials, goal: Goal) -> Found:
    if AddedNodes() not in trials.tried:
        raise OutOfTimeError
    if isinstance(goal, ErrorLimit):
        meeting = [added for added, value in trials.tried.items() if goal.meets(value)]
        closest = (max if goal.measure.least else min)(trials.tried, key=lambda added: trials.tried[added])
        best = min(meeting, key=trials.latency_us, default=closest)
        return trials.found(goal, best, met=bool(meeting))
    best = AddedNodes()
    for candidate in sorted(trials.tried, key=trials.latency_us):
        best = candidate if _gains(trials, candidate, best) else best
    return trials.found(goal, best)


def _in_order(trials: Trials, keys: Sequence[str]) -> list[str]:
    """The nodes that add an error, in the order of the graph, which needs fewer Casts than the ranking."""
    chosen = trials.shares.keys() & keys
    return [key for key in trials.with_products_inside(trials.prices.base) if key in chosen]


def _by_own_error(trials: Trials, keys: Sequence[str]) -> list[str]:
    """The nodes by the squared error that each adds itself, over its cost in FP32."""
    useful, extra = {*trials.useful_nodes()}, trials.prices.extra

    def worth(key: str) -> tuple[bool, float]:
        return key in useful, trials.errors[key] ** 2 / (extra[key] + LEAST_US)

    return sorted(_in_order(trials, keys), key=worth, reverse=True)


def most_accurate(trials: Trials, budget: Budget, most: int = MOST) -> Found:
    """Puts as many of the best-ranked nodes in FP32 as the budget allows, or fewer if that is more accurate.

    The useful nodes by rank and in the order of the graph are tried, whole and in part (`_shorter`): `most`
    plans within the budget in all, including the rules' plan.

    In order of latency, a plan that is enough better than the best so far (`LEAST_GAIN`) takes its place. If
    there is none, the rules' plan is kept.

    Raises:
        ArithmeticRunError: ONNX Runtime cannot run the model.
    """
    best, base = AddedNodes(), trials.latency_us(AddedNodes())
    trials.value(best)
    limit = base * (1.0 + budget.share)
    ranked = trials.useful_nodes()
    sequences = (ranked, _in_order(trials, ranked))
    turns = zip_longest(*(_shorter(trials, keys, limit) for keys in sequences))
    candidates = [candidate for turn in turns for candidate in turn if candidate is not None]
    within = (candidate for candidate in candidates if trials.latency_us(candidate) <= limit)
    for candidate in sorted(islice(trials.different(within), most - 1), key=trials.latency_us):
        if _gains(trials, candidate, best):
            best = candidate
    return trials.found(budget, best)


def _shorter(trials: Trials, ranked: Sequence[str], limit_us: float) -> Iterator[AddedNodes]:
    """Yields all nodes, those that fill the budget, the longest start, and a half, a quarter, ... of it.

    All nodes may cost less than a part of them, which needs Casts and splits kernels. What fills the budget
    is the longest start within it, and later nodes that still fit.
    """
    yield AddedNodes(ranked)
    above = bisect(len(ranked) + 1, lambda n: trials.latency_us(AddedNodes(ranked[:n])) > limit_us)
    longest, chosen = above - 1, list(ranked[: above - 1])
    left = limit_us - trials.latency_us(AddedNodes(chosen))
    for key in ranked[longest:]:
        if (extra := trials.prices.extra.get(key, 0.0)) <= left:
            chosen.append(key)
            left -= extra
    yield AddedNodes(chosen)
    while longest:
        yield AddedNodes(ranked[:longest])
        longest //= 2


def _gains(trials: Trials, candidate: AddedNodes, other: AddedNodes) -> bool:
    """True if a candidate is worth its latency; for a metric where more is better, if it is better."""
    if trials.metric.least:
        return trials.value(candidate) > trials.value(other)
    cost = (trials.latency_us(candidate) - trials.latency_us(other)) / trials.latency_us(AddedNodes())
    least = min(MOST_GAIN, max(LEAST_GAIN, cost))
    return trials.value(candidate) <= (1.0 - least) * trials.value(other)
