"""The search as a stage of `fix`: by emulation, or on an engine, and what is told of it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from rewriter import checks
from rewriter.base import Target
from rewriter.emulation import Accumulation
from rewriter.engines.protocol import EngineName
from rewriter.facts import Facts
from rewriter.inputs import Samples
from rewriter.metrics import named
from rewriter.model import Array, Model
from rewriter.plan import Plan
from rewriter.result import Check, Frontier, FrontierPoint, Searched
from rewriter.search.cheapest import cheapest
from rewriter.search.effort import affordable
from rewriter.search.engine_evaluator import EngineEvaluator
from rewriter.search.evaluate import Problem
from rewriter.search.frontier import frontier, of_points
from rewriter.search.goal import Aim, Budget, Fastest, Found, Goal
from rewriter.search.groups import groups
from rewriter.search.rounds import by_measurement
from rewriter.search.trials import Trials
from rewriter.search.within import most_accurate

EMULATED_SAMPLES, RUN_SAMPLES = 4, 16
"""How many samples a search compares each plan on: emulated, and on an engine."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Order:
    """What `fix` asks of the search.

    Attributes:
        aim: None: only the frontier is asked for.
        engine: What builds and runs plans; None: emulation.
        seconds: After which an engine is asked about no more plans.
    """

    aim: Aim | None
    metric: str
    pareto: bool
    engine: EngineName | None
    seconds: float
    build_timeout_s: float
    accumulation: Accumulation
    target: Target


@dataclass(frozen=True)
class Answer:
    """What the search gives: `plan` is the rules' one where nothing better was found.

    Attributes:
        check: Whether the aim was reached; None if there was none.
        warnings: Sentences that the user should read.
    """

    plan: Plan
    check: Check | None = None
    frontier: Frontier | None = None
    searched: Searched | None = None
    warnings: tuple[str, ...] = ()


def answer(
    original: Model,
    structured: Model,
    facts: Facts,
    samples: Samples,
    plan: Plan,
    order: Order,
    progress: Progress,
) -> Answer:
    """Search from the rules' `plan` of `structured`, compared with what `original` gives.

    Raises:
        ArithmeticRunError: ONNX Runtime cannot run the model.
        EngineError: the engine's library is not installed.
    """
    start = time.monotonic()
    effort = affordable(structured, facts, min(len(samples), EMULATED_SAMPLES), order.accumulation)
    count = effort.samples if order.engine is None else RUN_SAMPLES
    compared: Sequence[Mapping[str, Array]] = list(islice(samples, count))
    exact = checks.expected_outputs(original, compared).exact
    problem = Problem(structured, facts, compared, exact, order.accumulation, order.target)
    reason = f"added by the search for {order.aim or order.metric}"
    trials = Trials(effort.of(problem), plan, named(order.metric), reason)
    if order.engine is None:
        made = _emulated(trials, plan, order, effort.most)
    else:
        made = _measured(problem, trials, order, start + order.seconds, progress)
    told = (effort.told,) if effort.told and order.engine is None else ()
    check = made.check and replace(made.check, seconds=time.monotonic() - start)
    return replace(made, check=check, warnings=(*told, *made.warnings))


def _emulated(trials: Trials, plan: Plan, order: Order, most: int) -> Answer:
    aim = order.aim
    found: Found | None = None
    if isinstance(aim, Goal):
        found = cheapest(trials, aim)
    elif isinstance(aim, Budget):
        found = most_accurate(trials, aim, most)
    chosen = found.plan if found is not None else plan
    drawn = replace(frontier(trials, order.metric), chosen=chosen) if order.pareto else None
    return Answer(chosen, _check(found) if found is not None else None, drawn)


def _measured(problem: Problem, trials: Trials, order: Order, until: float, progress: Progress) -> Answer:
    assert order.engine is not None
    progress("search: ranking nodes", 0, 0)
    with tempfile.TemporaryDirectory(prefix="rewriter-search-") as folder:
        judge = EngineEvaluator(
            problem,
            trials.metric,
            order.engine,
            Path(folder),
            until,
            order.build_timeout_s,
            progress=progress,
        )
        found = by_measurement(
            trials,
            groups(trials),
            order.aim or Fastest(order.metric),
            judge,
            lambda: time.monotonic() < until,
            lambda line: progress(f"search: {line}", 0, 0),
        )
    points = [
        FrontierPoint(one.latency_us, one.value, one.plan)
        for one in found.tried
        if one.latency_us is not None
    ]
    drawn = of_points(points, order.metric, trials.metric.least, found.origin) if order.pareto else None
    return Answer(
        found.plan,
        _check(found),
        drawn and replace(drawn, chosen=found.plan),
        Searched(order.metric, found.origin, found.tried),
        tuple(f"--search gpu: {failure}" for failure in judge.failures),
    )


def _check(found: Found) -> Check:
    return Check(found.goal.option, found.met, found.summary)
