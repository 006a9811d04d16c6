"""Runs a search by emulation, and reports what it found."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from rewriter.base import Target
from rewriter.data.inputs import Samples
from rewriter.emulation import Accumulation, reference
from rewriter.engines.onnxruntime import Session
from rewriter.figures.metrics import DETECTIONS
from rewriter.figures.pair import is_float
from rewriter.figures.tolerances import RELATIVE_L2
from rewriter.model import Array, Model
from rewriter.model import facts as tensor_facts
from rewriter.model.facts import Facts
from rewriter.plan import Plan
from rewriter.search.cheapest import cheapest
from rewriter.search.effort import Effort, RunCost, for_budget, for_tolerance
from rewriter.search.goal import Budget, ErrorLimit, Found, Goal
from rewriter.search.problem import Problem, Sample
from rewriter.search.trials import Trials
from rewriter.search.within import most_accurate
from rewriter.verification.expected import Outputs, selects_rows
from rewriter.verification.verdict import Check

SAMPLES = 4
"""Samples that each plan is compared on, at most."""


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
    """The options of a search."""

    goal: Goal
    accumulation: Accumulation
    target: Target


@dataclass(frozen=True)
class SearchOutcome:
    """The result of a search.

    Attributes:
        plan: The best plan; the rules' plan if no better one was found.
        check: Passed if the goal was reached.
        warnings: Sentences for the user.
    """

    plan: Plan
    check: Check
    warnings: tuple[str, ...] = ()


def run(given: SearchInput, request: SearchRequest) -> SearchOutcome:
    """Searches from the rules' plan of a model.

    Raises:
        ArithmeticRunError: ONNX Runtime cannot run the model.
    """
    start = time.monotonic()
    goal = _with_rows_as_sets(request.goal, given.original)
    few = isinstance(goal, ErrorLimit) and goal.first_found
    candidates = list(islice(given.samples, SAMPLES))
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

    exact = _exact(given.original, candidates, enough)
    compared: Sequence[Sample] = candidates[: len(exact)]
    if few:
        at = _strongest(exact)
        compared, exact = [candidates[at]], [exact[at]]
    problem = Problem(
        given.structured, given.facts, compared, exact, request.accumulation, request.target, given.adapted
    )
    ranked = effort.of(problem)
    judged = replace(ranked, accumulation="fp16") if isinstance(goal, Budget) else ranked
    trials = Trials(judged, given.plan, goal.measure, f"added by the search for {goal}", ranked)
    found = reach(trials, goal, effort.most)
    check = Check(goal.option, found.met, found.summary, seconds=time.monotonic() - start)
    return SearchOutcome(found.plan, check, (effort.reduced,) if effort.reduced else ())


def reach(trials: Trials, goal: Goal, most: int) -> Found:
    """Returns the plan that reaches the goal by emulation and recorded costs.

    Args:
        most: Plans that are evaluated for a budget, at most.
    """
    return cheapest(trials, goal) if isinstance(goal, ErrorLimit) else most_accurate(trials, goal, most)


def _with_rows_as_sets(goal: Goal, original: Model) -> Goal:
    """Returns the goal with rows matched as sets if the model selects rows and the metric is the default.

    Rows in another order differ in every element.
    """
    by_default = goal.metric == RELATIVE_L2 and selects_rows(original)
    return replace(goal, metric=DETECTIONS) if by_default else goal


def _exact(original: Model, samples: Sequence[Sample], enough: Callable[[float], int]) -> list[Outputs]:
    """Returns the original's outputs in FP32 for as many samples as are needed, at least one.

    Args:
        enough: Returns how many samples are needed; called with the processor seconds of the first run.
    """
    found: list[Outputs] = []
    most = 1
    with Session(reference(original, tensor_facts.infer(original))) as session:
        for sample in samples:
            start = time.process_time()
            found.append(session.run(sample))
            if len(found) == 1:
                most = enough(time.process_time() - start)
            if len(found) >= most:
                break
    return found


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
