"""The search as a stage of `fix`: by emulation, or on an engine, and what is told of it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from rewriter.base import Target
from rewriter.data.inputs import Samples
from rewriter.emulation import Accumulation, reference
from rewriter.engines.deployment import Deployment
from rewriter.engines.onnxruntime import Session
from rewriter.engines.protocol import EngineName
from rewriter.errors import TimeUpError
from rewriter.figures.metrics import DETECTIONS, named
from rewriter.figures.tolerances import RELATIVE_L2
from rewriter.model import Model
from rewriter.model import facts as tensor_facts
from rewriter.model.facts import Facts
from rewriter.model.stopwatch import LASTING, Progress
from rewriter.plan import Plan
from rewriter.search.cheapest import cheapest
from rewriter.search.clock import Clock
from rewriter.search.effort import for_budget, for_tolerance
from rewriter.search.engine_evaluator import EngineEvaluator
from rewriter.search.evaluate import Problem, Sample
from rewriter.search.frontier import frontier, of_points
from rewriter.search.goal import Aim, Budget, Fastest, Found, Goal
from rewriter.search.groups import groups
from rewriter.search.result import Frontier, FrontierPoint, Searched
from rewriter.search.rounds import by_measurement
from rewriter.search.trials import Trials
from rewriter.search.within import most_accurate
from rewriter.verification.expected import Outputs, expected_outputs, selects_rows
from rewriter.verification.verdict import Check

EMULATED_SAMPLES, RUN_SAMPLES = 4, 16
"""How many samples a search compares each plan on: emulated, and on an engine."""

EXPECTED_SHARE, RANKED_SHARE = 0.15, 0.4
"""Shares of an engine's time after which the original runs on no more samples, and a ranking is given up."""


@dataclass(frozen=True)
class Subject:
    """What is searched.

    Attributes:
        original: What plans are compared with.
        structured: The model that they are plans of, and its facts.
        plan: The rules' one.
    """

    original: Model
    structured: Model
    facts: Facts
    samples: Samples
    plan: Plan


@dataclass(frozen=True)
class Order:
    """What `fix` asks of the search.

    Attributes:
        aim: None: only the frontier is asked for.
        engine: What builds and runs plans; None: emulation.
        seconds: What a search on an engine may take, with all that belongs to it.
        deployment: Plugins and optimisation profile of the engine.
    """

    aim: Aim | None
    metric: str
    pareto: bool
    engine: EngineName | None
    seconds: float
    build_timeout_s: float
    accumulation: Accumulation
    target: Target
    deployment: Deployment = field(default_factory=Deployment)


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
    subject: Subject,
    order: Order,
    progress: Progress,
) -> Answer:
    """Search from the rules' plan of a model, compared with what the original gives.

    Raises:
        ArithmeticRunError: ONNX Runtime cannot run the model.
        EngineError: the engine's library is not installed.
    """
    clock, order = Clock(order.seconds), _of_sets(order, subject.original)
    if order.engine is None:
        made = _by_emulation(subject, order)
    else:
        made = _on_engine(subject, order, order.engine, clock, progress)
    return replace(made, check=made.check and replace(made.check, seconds=clock.spent))


def _of_sets(order: Order, original: Model) -> Order:
    """The order with rows matched as sets, if the model selects its rows and no other metric was asked for.

    Element by element, rows in another order differ by all that they hold.
    """
    if order.metric != RELATIVE_L2 or not selects_rows(original):
        return order
    aim = replace(order.aim, metric=DETECTIONS) if order.aim is not None else None
    return replace(order, metric=DETECTIONS, aim=aim)


def _by_emulation(
    subject: Subject,
    order: Order,
) -> Answer:
    given, budget = min(len(subject.samples), EMULATED_SAMPLES), isinstance(order.aim, Budget)
    if budget:
        effort = for_budget(subject.structured, subject.facts, given)
    else:
        effort = for_tolerance(subject.structured, subject.facts, given, order.accumulation)
    compared: Sequence[Sample] = list(islice(subject.samples, effort.samples))
    exact = expected_outputs(subject.original, compared).exact
    ranked = effort.of(_problem(subject, order, compared, exact))
    judged = replace(ranked, accumulation="fp16") if budget else ranked
    trials = Trials(judged, subject.plan, named(order.metric), _reason(order), ranked)
    made = _emulated(trials, subject.plan, order, effort.most)
    return replace(made, warnings=((effort.told,) if effort.told else ()) + made.warnings)


def _problem(subject: Subject, order: Order, compared: Sequence[Sample], exact: Sequence[Outputs]) -> Problem:
    """What plans are judged by: on these samples, with what the original gives."""
    return Problem(subject.structured, subject.facts, compared, exact, order.accumulation, order.target)


def _reason(order: Order) -> str:
    """Why a node is in FP32 that the search put there."""
    return f"added by the search for {order.aim or order.metric}"


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


def _on_engine(
    subject: Subject,
    order: Order,
    engine: EngineName,
    clock: Clock,
    progress: Progress,
) -> Answer:
    """One sample ranks the nodes: the engine judges the plans."""

    def told(line: str) -> None:
        progress(f"{LASTING}{clock.spent:.0f} s of {clock.seconds:g}: {line}", 0, 0)

    aim = order.aim or Fastest(order.metric)
    told("running the original")
    compared: Sequence[Sample] = list(islice(subject.samples, RUN_SAMPLES))
    try:
        exact = _exact(subject.original, compared, clock)
    except TimeUpError:
        return _too_late(subject.plan, aim)
    problem = _problem(subject, order, compared[: len(exact)], exact)
    effort = for_tolerance(subject.structured, subject.facts, 1, order.accumulation)
    ranker, ranked_by = effort.of(problem), clock.at(RANKED_SHARE)
    trials = Trials(problem, subject.plan, named(order.metric), _reason(order), ranker, ranked_by)
    told("the rules' plan first")
    with tempfile.TemporaryDirectory(prefix="rewriter-search-") as folder:
        judge = EngineEvaluator(
            problem,
            trials.metric,
            engine,
            Path(folder),
            clock,
            order.deployment,
            order.build_timeout_s,
        )
        found = by_measurement(trials, groups(trials, aim), aim, judge, told)
    return _answered(found, order, trials.metric.least, judge.failures)


def _exact(original: Model, samples: Sequence[Sample], clock: Clock) -> list[Outputs]:
    """Outputs of the original in FP32: for all samples, or those that the time is enough for, one at least.

    Raises:
        TimeUpError: it is not enough for one.
    """
    found: list[Outputs] = []
    with Session(reference(original, tensor_facts.infer(original))) as session:
        for sample in samples:
            try:
                found.append(session.run(sample, until=clock.at(EXPECTED_SHARE) if found else clock.end))
            except TimeUpError:
                if not found:
                    raise
                break
    return found


def _too_late(plan: Plan, aim: Aim) -> Answer:
    told = f"{aim}: the time was up before the original had run on one sample: --search-seconds"
    return Answer(plan, Check(aim.option, not isinstance(aim, Goal), f"{told}; the rules' plan is kept"))


def _answered(found: Found, order: Order, least: bool, failures: Sequence[str]) -> Answer:
    points = [
        FrontierPoint(one.latency_us, one.value, one.plan)
        for one in found.tried
        if one.latency_us is not None
    ]
    drawn = of_points(points, order.metric, least, found.origin) if order.pareto else None
    return Answer(
        found.plan,
        _check(found),
        drawn and replace(drawn, chosen=found.plan),
        Searched(order.metric, found.origin, found.tried),
        tuple(f"--search gpu: {failure}" for failure in failures),
    )


def _check(found: Found) -> Check:
    return Check(found.goal.option, found.met, found.summary)
