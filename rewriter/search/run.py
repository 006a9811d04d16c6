"""Runs a search, by emulation or on an engine, and reports what it found."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import numpy as np

from rewriter.base import Target
from rewriter.data.inputs import Samples
from rewriter.emulation import Accumulation, reference
from rewriter.engines.deployment import Deployment
from rewriter.engines.onnxruntime import Session
from rewriter.engines.parallel_builds import TIMES_KERNELS
from rewriter.engines.protocol import EngineName
from rewriter.errors import TimeUpError
from rewriter.figures.metrics import DETECTIONS, named
from rewriter.figures.pair import is_float
from rewriter.figures.tolerances import RELATIVE_L2
from rewriter.model import Array, Model
from rewriter.model import facts as tensor_facts
from rewriter.model.facts import Facts
from rewriter.model.stopwatch import LASTING, Progress
from rewriter.plan import Plan
from rewriter.planning.costs.node_times import ORIGIN
from rewriter.search.builder import Builder
from rewriter.search.candidate import Candidate, Group, added
from rewriter.search.cheapest import cheapest
from rewriter.search.clock import Clock
from rewriter.search.effort import Effort, RunCost, for_budget, for_tolerance
from rewriter.search.engine_evaluator import EngineEvaluator
from rewriter.search.fp32_groups import groups
from rewriter.search.goal import Budget, ErrorLimit, Fastest, Found, Goal
from rewriter.search.pareto import Frontier, FrontierPoint, frontier_of
from rewriter.search.problem import Problem, Sample
from rewriter.search.rounds import by_measurement
from rewriter.search.trials import Trials
from rewriter.search.tried_plans import Searched
from rewriter.search.within import most_accurate
from rewriter.verification.expected import Outputs, selects_rows
from rewriter.verification.verdict import Check

EMULATED_SAMPLES, RUN_SAMPLES = 4, 16
"""Samples that each plan is compared on: emulated, and on an engine."""

EXPECTED_SHARE, RANKED_SHARE = 0.15, 0.4
"""Shares of the search's time after which the original runs on no more samples, and a ranking is given up."""


@dataclass(frozen=True)
class SearchInput:
    """A model whose plans are compared with its original.

    Attributes:
        structured: The model fitted to the rules' plan.
        facts: Facts of `structured`.
        plan: The rules' plan.
        adapted: As for `Problem`.
    """

    original: Model
    structured: Model
    facts: Facts
    samples: Samples
    plan: Plan
    adapted: Callable[[Plan], Model] | None = None


@dataclass(frozen=True)
class SearchRequest:
    """The options of a search.

    Attributes:
        goal: None for the frontier alone.
        engine: Builds and runs plans; None: emulation.
        seconds: Time limit of the whole search on an engine.
        deployment: Plugins and optimisation profile of the engine.
    """

    goal: Goal | None
    metric: str
    pareto: bool
    engine: EngineName | None
    seconds: float
    build_timeout_s: float
    accumulation: Accumulation
    target: Target
    deployment: Deployment = field(default_factory=Deployment)

    @property
    def reason(self) -> str:
        """The reason in the plan for a node that the search puts in FP32."""
        return f"added by the search for {self.goal or self.metric}"


@dataclass(frozen=True)
class SearchOutcome:
    """The result of a search.

    Attributes:
        plan: The best plan; the rules' plan if no better one was found.
        check: Passed if the goal was reached; None if there was no goal.
        warnings: Sentences for the user.
    """

    plan: Plan
    check: Check | None = None
    frontier: Frontier | None = None
    searched: Searched | None = None
    warnings: tuple[str, ...] = ()


def run(given: SearchInput, request: SearchRequest, progress: Progress) -> SearchOutcome:
    """Searches from the rules' plan of a model.

    Raises:
        ArithmeticRunError: ONNX Runtime cannot run the model.
        EngineError: the engine's library is not installed.
    """
    clock, request = Clock(request.seconds), _with_rows_as_sets(request, given.original)
    if request.engine is None:
        made = _by_emulation(given, request)
    else:
        made = _on_engine(given, request, request.engine, clock, progress)
    return replace(made, check=made.check and replace(made.check, seconds=clock.spent))


def reach(trials: Trials, goal: ErrorLimit | Budget, most: int) -> Found:
    """Returns the plan that reaches the goal by emulation and recorded costs.

    Args:
        most: Plans that are evaluated for a budget, at most.
    """
    return cheapest(trials, goal) if isinstance(goal, ErrorLimit) else most_accurate(trials, goal, most)


def frontier(trials: Trials, metric: str, chosen: Plan | None = None) -> Frontier:
    """Tries 1, 2, 4, ... of the best nodes in FP32, and all; returns the frontier of all plans tried so far.

    Raises:
        ArithmeticRunError: ONNX Runtime cannot run the model.
    """
    ranked, size = trials.all_nodes(), 1
    trials.value(Candidate())
    while size < 2 * len(ranked):
        trials.value(added(ranked[:size]))
        size *= 2
    points = (FrontierPoint(trials.latency_us(c), trials.value(c), trials.plan_of(c)) for c in trials.tried())
    return frontier_of(points, metric, trials.metric.least, ORIGIN, chosen)


def _with_rows_as_sets(request: SearchRequest, original: Model) -> SearchRequest:
    """Returns the request with rows matched as sets if the model selects rows and the metric is the default.

    Rows in another order differ in every element.
    """
    if request.metric != RELATIVE_L2 or not selects_rows(original):
        return request
    goal = replace(request.goal, metric=DETECTIONS) if request.goal is not None else None
    return replace(request, metric=DETECTIONS, goal=goal)


def _by_emulation(given: SearchInput, request: SearchRequest) -> SearchOutcome:
    goal, clock = request.goal, Clock(math.inf)
    few = isinstance(goal, ErrorLimit) and goal.first_found
    candidates = list(islice(given.samples, EMULATED_SAMPLES))
    effort = Effort(1, request.accumulation)

    def enough(run_s: float) -> int:
        nonlocal effort
        cost = RunCost.of(given.structured, given.facts, run_s)
        if few:
            return len(candidates)
        if isinstance(goal, Budget):
            effort = for_budget(cost, len(candidates))
        else:
            effort = for_tolerance(cost, len(candidates), request.accumulation)
        return effort.samples

    exact, _ = _exact(given.original, candidates, clock, enough)
    compared: Sequence[Sample] = candidates[: len(exact)]
    if few:
        at = _strongest(exact)
        compared, exact = [candidates[at]], [exact[at]]
    ranked = effort.of(_problem(given, request, compared, exact))
    judged = replace(ranked, accumulation="fp16") if isinstance(goal, Budget) else ranked
    trials = Trials(judged, given.plan, named(request.metric), request.reason, ranked)
    found = reach(trials, goal, effort.most) if isinstance(goal, ErrorLimit | Budget) else None
    plan = found.plan if found is not None else given.plan
    return SearchOutcome(
        plan,
        None if found is None else _check(found),
        frontier(trials, request.metric, plan) if request.pareto else None,
        warnings=(effort.reduced,) if effort.reduced else (),
    )


def _problem(
    given: SearchInput, request: SearchRequest, compared: Sequence[Sample], exact: Sequence[Outputs]
) -> Problem:
    return Problem(
        given.structured, given.facts, compared, exact, request.accumulation, request.target, given.adapted
    )


def _on_engine(
    given: SearchInput, request: SearchRequest, engine: EngineName, clock: Clock, progress: Progress
) -> SearchOutcome:
    """Ranks the nodes by an emulation of one sample, and judges the plans on the engine."""

    def report(line: str) -> None:
        progress(f"{LASTING}{clock.spent:.0f} s of {clock.seconds:g}: {line}", 0, 0)

    goal = request.goal or Fastest(request.metric)
    report("running the original")
    compared: Sequence[Sample] = list(islice(given.samples, RUN_SAMPLES))
    try:
        exact, run_s = _exact(given.original, compared, clock)
    except TimeUpError:
        why = f"{goal}: the time was up before the original had run on one sample: --search-seconds"
        met = not isinstance(goal, ErrorLimit)
        return SearchOutcome(given.plan, Check(goal.option, met, f"{why}; the rules' plan is kept"))
    problem = _problem(given, request, compared[: len(exact)], exact)
    cost = RunCost.of(given.structured, given.facts, run_s)
    effort = for_tolerance(cost, 1, request.accumulation)
    ranker, ranked_by = effort.of(problem), clock.at(RANKED_SHARE)
    trials = Trials(problem, given.plan, named(request.metric), request.reason, ranker, ranked_by)
    report("the rules' plan first")
    deployment, timeout_s = request.deployment, request.build_timeout_s
    with (
        tempfile.TemporaryDirectory(prefix="rewriter-search-") as folder,
        Builder(problem, engine, deployment, Path(folder), clock, timeout_s) as builder,
        ThreadPoolExecutor(1) as ahead,
    ):
        judge = EngineEvaluator(builder, trials.metric)
        batches = groups(trials, goal)
        if engine not in TIMES_KERNELS:  # the nodes are ranked while the rules' plan is built and run
            batches = _one_ahead(
                batches, ahead, lambda batch: builder.begin(trials.plan_of(one.candidate) for one in batch)
            )
        found = by_measurement(trials, batches, goal, judge, report)
    return _engine_outcome(found, request, trials.metric.least, judge.failures)


def _one_ahead(
    batches: Iterator[list[Group]], pool: ThreadPoolExecutor, begin: Callable[[list[Group]], None]
) -> Iterator[list[Group]]:
    """Yields batches; a thread makes the next one meanwhile, and has begun with the first.

    Args:
        begin: Called in the thread with each batch as soon as it is made.
    """

    def made() -> list[Group] | None:
        if (batch := next(batches, None)) is not None:
            begin(batch)
        return batch

    def following() -> Future[list[Group] | None]:
        return pool.submit(made)

    def each(coming: Future[list[Group] | None]) -> Iterator[list[Group]]:
        while (batch := coming.result()) is not None:
            coming = following()
            yield batch

    return each(following())


def _exact(
    original: Model,
    samples: Sequence[Sample],
    clock: Clock,
    enough: Callable[[float], int] = lambda run_s: RUN_SAMPLES,
) -> tuple[list[Outputs], float]:
    """Returns the original's outputs in FP32 for as many samples as there is time for, at least one.

    Args:
        enough: Returns how many samples are needed; called with the processor seconds of the first run,
            which are returned, too.

    Raises:
        TimeUpError: there is no time for one sample.
    """
    found: list[Outputs] = []
    run_s, most = 0.0, 1
    with Session(reference(original, tensor_facts.infer(original))) as session:
        for sample in samples:
            start = time.process_time()
            try:
                found.append(session.run(sample, until=clock.at(EXPECTED_SHARE) if found else clock.end))
            except TimeUpError:
                if not found:
                    raise
                break
            if len(found) == 1:
                run_s = time.process_time() - start
                most = enough(run_s)
            if len(found) >= most:
                break
    return found, run_s


def _strongest(exact: Sequence[Outputs]) -> int:
    """The sample with the largest outputs: where a detector finds nothing, relative errors mean nothing."""
    sizes = np.array([[_size(value) for value in outputs.values()] for outputs in exact])
    largest = np.maximum(sizes.max(axis=0), np.finfo(np.float64).tiny)
    return int(np.argmax((sizes / largest).sum(axis=1)))


def _size(value: Array) -> float:
    """The L2 norm of a float output's finite elements; 0.0 of other types."""
    if not is_float(value):
        return 0.0
    return float(np.linalg.norm(value[np.isfinite(value)].astype(np.float64)))


def _engine_outcome(
    found: Found, request: SearchRequest, least: bool, failures: Sequence[str]
) -> SearchOutcome:
    points = (
        FrontierPoint(one.latency_us, one.value, one.plan)
        for one in found.tried
        if one.latency_us is not None
    )
    return SearchOutcome(
        found.plan,
        _check(found),
        frontier_of(points, request.metric, least, found.origin, found.plan) if request.pareto else None,
        Searched(request.metric, found.origin, found.tried),
        tuple(f"--search gpu: {failure}" for failure in failures),
    )


def _check(found: Found) -> Check:
    return Check(found.goal.option, found.met, found.summary)
