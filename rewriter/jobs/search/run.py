"""Runs a search by emulation, and reports what it found."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from rewriter.ir.base import Target
from rewriter.ir.model import Array, Model
from rewriter.ir.model import facts as tensor_facts
from rewriter.ir.plan import Plan
from rewriter.jobs.search.cheapest import cheapest
from rewriter.jobs.search.effort import Effort, RunCost, affordable
from rewriter.jobs.search.goal import ErrorLimit, Goal
from rewriter.jobs.search.trials import Problem, Trials
from rewriter.jobs.search.within import most_accurate
from rewriter.judge.expected import Outputs, selects_rows
from rewriter.judge.verdict import Check
from rewriter.runtime.emulation import Accumulation, reference
from rewriter.runtime.engines.onnxruntime import Session
from rewriter.runtime.figures.metrics import DETECTIONS
from rewriter.runtime.figures.pair import is_float
from rewriter.runtime.figures.tolerances import RELATIVE_L2
from rewriter.runtime.inputs import Samples

SAMPLES = 4
"""Samples that each plan is compared on, at most."""


@dataclass(frozen=True)
class SearchRequest:
    """A search from the rules' plan of a model.

    Attributes:
        original: The model that plans are compared with.
        structured: The model that `plan`, the rules' plan, is for.
        goal: What the plan shall reach.
        accumulation: Type of the emulated sums.
    """

    original: Model
    structured: Model
    samples: Samples
    plan: Plan
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


def run(request: SearchRequest) -> SearchOutcome:
    """Searches from the rules' plan of a model.

    Raises:
        ArithmeticRunError: ONNX Runtime cannot run the model.
    """
    start, goal = time.monotonic(), request.goal
    if goal.metric == RELATIVE_L2 and selects_rows(request.original):
        goal = replace(goal, metric=DETECTIONS)  # rows in another order differ in every element
    problem, effort = _problem(replace(request, goal=goal))
    trials = Trials(problem, request.plan, goal.measure, f"added by the search for {goal}")
    if isinstance(goal, ErrorLimit):
        found = cheapest(trials, goal)
    else:
        found = most_accurate(trials, goal, effort.plans)
    check = Check(goal.option, found.met, found.summary, seconds=time.monotonic() - start)
    return SearchOutcome(found.plan, check, (effort.reduced,) if effort.reduced else ())


def _problem(request: SearchRequest) -> tuple[Problem, Effort]:
    """Runs the original on as many samples as the search can afford; for the first plan found, on all."""
    samples, goal, expected = list(islice(request.samples, SAMPLES)), request.goal, list[Outputs]()
    facts = tensor_facts.infer(request.structured)
    first_found = isinstance(goal, ErrorLimit) and goal.first_found
    effort = Effort(len(samples), request.accumulation, request.accumulation)
    with Session(reference(request.original, tensor_facts.infer(request.original)), gpu=True) as session:
        start = time.process_time()
        for sample in samples:
            expected.append(session.run(sample))
            if len(expected) == 1 and not first_found:
                cost = RunCost.of(request.structured, facts, time.process_time() - start)
                effort = affordable(goal, cost, len(samples), request.accumulation)
            if len(expected) == effort.samples:
                break
    places = [_strongest(expected)] if first_found else range(len(expected))
    problem = Problem(
        request.structured,
        facts,
        [samples[place] for place in places],
        [expected[place] for place in places],
        effort.judging_sums,
        effort.ranking_sums,
        request.target,
    )
    return problem, effort


def _strongest(exact: Sequence[Outputs]) -> int:
    """The sample with the largest outputs: where a detector finds nothing, relative errors mean nothing."""

    def size(value: Array) -> float:
        finite = value[np.isfinite(value)] if is_float(value) else np.zeros(1)
        return float(np.linalg.norm(finite.astype(np.float64)))

    sizes = np.array([[size(value) for value in outputs.values()] for outputs in exact])
    largest = np.maximum(sizes.max(axis=0), np.finfo(np.float64).tiny)
    return int(np.argmax((sizes / largest).sum(axis=1)))
