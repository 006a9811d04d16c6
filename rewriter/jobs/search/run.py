"""Searches for plans from the rules' plan: the cheapest within a tolerance, the most accurate in a budget.

Candidates are evaluated by emulation and recorded costs. Nodes are ranked by the squared error of the outputs
that each causes (`contributions`) over its estimated cost in FP32.
"""

import math
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, zip_longest

import numpy as np

from rewriter.base.sandbox import processor_s
from rewriter.base.stopwatch import OutOfTimeError, within
from rewriter.ir.model import Array, Model
from rewriter.ir.plan import NodePatterns, Plan
from rewriter.jobs.search.effort import MOST, Effort, RunCost, affordable
from rewriter.jobs.search.goal import Budget, ErrorLimit, Found, Goal
from rewriter.jobs.search.trials import AddedNodes, Memory, Trials
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

NEAR_FP32 = 1.25
"""Largest limit, in units of FP32's error, at which only the ranking decides: such a network amplifies
rounding. The start of a LeViT that met the limit on three samples had 2.8 times FP32's error on a fourth."""

AIM = 0.95
"""Share of a limit that plans are foretold to reach: half of the foretold errors are too small."""

SPREAD = 0.1
"""Share of latency that the ranking's plan adds from which other orders are tried, too."""

SLOW_GAIN = 0.05
"""Least share of its latency that another plan of a slow model has to save before it is emulated, too."""


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
    """Puts nodes in FP32 until a tolerance is met, at the least latency that the foretold errors allow.

    Where the tolerance is out of reach, the plan comes close to all nodes in FP32: the caller judges it by
    other measures, too.

    Raises:
        ArithmeticRunError: ONNX Runtime cannot run the model.
    """
    # a limit that is known to be missed: the run that ranks the nodes has the outputs of the rules' plan, too
    ranked = trials.all_nodes() if goal.worst else []
    if goal.meets(trials.value(AddedNodes())):
        return trials.found(goal, AddedNodes())
    ranked = ranked or trials.all_nodes()
    if (chosen := _foretold(trials, goal, ranked)) is not None:
        return trials.found(goal, chosen)
    best = trials.value(AddedNodes(ranked))
    near = best if goal.measure.least else AS_FP32 * best
    close = replace(goal, tolerance=near, fp32=near)
    chosen = _foretold(trials, close, ranked) or AddedNodes(ranked)
    return replace(trials.found(goal, chosen, met=False), value=best)


@dataclass
class _Sequence:
    """Nodes in an order in which they go to FP32; errors are squared.

    Its first `low` nodes leave an error `before` that misses the goal, its first `high` ones leave `after`.
    """

    keys: Sequence[str]
    before: float
    after: float
    low: int = 0
    high: int = 0
    turns: int = 0

    def next(self, trials: Trials, limit: float) -> int:
        """The number of nodes that is foretold to leave `limit`, since squared errors add up.

        Every other one is halfway in a quick model, and all where an error is not finite, or more is better.
        """
        infinite = trials.metric.least or not self.after < self.before < math.inf
        if infinite or (self.turns % 2 and not trials.slow):
            return (self.low + self.high) // 2
        sums = np.cumsum([min(trials.shares.get(key, 0.0), 1.0) for key in self.keys[self.low : self.high]])
        part = (self.before - limit) / (self.before - self.after)
        return min(self.low + 1 + int(np.searchsorted(sums, part * sums[-1])), self.high - 1)

    def learn(self, number: int, error: float, *, met: bool) -> None:
        self.turns += 1
        if met:
            self.high, self.after = number, error**2
        else:
            self.low, self.before = number, error**2


def _foretold(trials: Trials, goal: ErrorLimit, ranked: Sequence[str]) -> AddedNodes | None:
    """The cheapest plan that meets a goal, of the plans that are foretold to; few of them are emulated.

    Each sequence of nodes foretells how many of them are needed, and learns from the errors of its plans. Of
    these plans, the one with the least latency is emulated next.

    Returns:
        None if the plan with all nodes in FP32 does not meet the goal.
    """
    before, after = trials.value(AddedNodes()) ** 2, min(goal.fp32, AIM * goal.tolerance / 2.0) ** 2
    orders, useful, best = [ranked], trials.useful_nodes(), None
    if not goal.measure.least and goal.tolerance > NEAR_FP32 * goal.fp32:
        largest = [key for key in trials.ranked(by_cost=False) if key in {*useful}]
        orders += [largest, _in_order(trials, useful)]
    sequences = [_Sequence(keys, before, after, high=len(keys)) for keys in orders]
    for _ in range(MOST):
        if (option := _least_latency(trials, goal, sequences, best)) is None:
            break
        sequence, number = option
        added = AddedNodes(sequence.keys[:number])
        met = goal.meets(error := trials.value(added))
        sequence.learn(number, error, met=met)
        best = added if met else best
        if best is None:  # not as foretold: is the goal within reach?
            best = AddedNodes(ranked)
            if not goal.meets(least := trials.value(best)):
                return None
            if goal.tolerance <= NEAR_FP32 * least:
                del sequences[1:]
    whole = best or AddedNodes(ranked)
    return whole if goal.meets(trials.value(whole)) else None


def _least_latency(
    trials: Trials, goal: ErrorLimit, sequences: Sequence[_Sequence], best: AddedNodes | None
) -> tuple[_Sequence, int] | None:
    """The cheapest plan that is foretold to meet a goal, and its sequence; None if `best` is as cheap.

    More nodes than are foretold to be needed may cost less: they need fewer Casts, and split no kernels.
    """

    def price(option: tuple[_Sequence, int]) -> tuple[float, int]:
        sequence, number = option
        return trials.latency_us(AddedNodes(sequence.keys[:number])), number

    options = list[tuple[_Sequence, int]]()
    for sequence in sequences:
        while sequence.high - sequence.low > 1:
            number = sequence.next(trials, (AIM * goal.tolerance) ** 2)
            if (error := trials.evaluated(AddedNodes(sequence.keys[:number]))) is None:
                more = sequence.high - 1 - number
                options += [
                    (sequence, number + (more >> halvings)) for halvings in range(more.bit_length() + 1)
                ]
                break
            sequence.learn(number, error, met=goal.meets(error))
    cheap = (1.0 + SPREAD) * trials.latency_us(AddedNodes())
    by_rank = [option for option in options if option[0] is sequences[0] and price(option)[0] <= cheap]
    if by_rank or (best is not None and trials.latency_us(best) <= cheap):
        options = by_rank
    option = min(options, key=price, default=None)
    if option is None or best is None:
        return option
    limit = (1.0 - trials.slow * SLOW_GAIN) * trials.latency_us(best), len(best)
    return option if price(option) < limit else None


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
    numbers = range(1, len(ranked) + 1)
    longest = bisect_left(numbers, True, key=lambda n: trials.latency_us(AddedNodes(ranked[:n])) > limit_us)
    chosen = list(ranked[:longest])
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
