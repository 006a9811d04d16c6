"""Runs a search by emulation, and reports what it found."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
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


def search(
    original: Model,
    structured: Model,
    samples: Samples,
    plan: Plan,
    goal: Goal,
    accumulation: Accumulation,
    target: Target,
) -> tuple[Plan, Check, tuple[str, ...]]:
    """Searches from the rules' plan of a model.

    Args:
        original: The model that plans are compared with.
        structured: The model that `plan`, the rules' plan, is for.
        accumulation: Type of the emulated sums.

    Returns:
        The best plan, the check of the goal, and sentences for the user.

    Raises:
        ArithmeticRunError: ONNX Runtime cannot run the model.
    """
    start = time.monotonic()
    if goal.metric == RELATIVE_L2 and selects_rows(original):
        goal = replace(goal, metric=DETECTIONS)  # rows in another order differ in every element
    feeds, expected, facts = list(islice(samples, SAMPLES)), list[Outputs](), tensor_facts.infer(structured)
    first_found = isinstance(goal, ErrorLimit) and goal.first_found
    effort = Effort(len(feeds), accumulation, accumulation)
    with Session(reference(original, tensor_facts.infer(original)), gpu=True) as session:
        began = time.process_time()
        for sample in feeds:
            expected.append(session.run(sample))
            if len(expected) == 1 and not first_found:
                cost = RunCost.of(structured, facts, time.process_time() - began)
                effort = affordable(goal, cost, len(feeds), accumulation)
            if len(expected) == effort.samples:
                break
    places = [_strongest(expected)] if first_found else range(len(expected))
    problem = Problem(
        structured,
        facts,
        [feeds[place] for place in places],
        [expected[place] for place in places],
        effort.judging_sums,
        effort.ranking_sums,
        target,
    )
    trials = Trials(problem, plan, goal.measure, f"added by the search for {goal}")
    found = (
        cheapest(trials, goal) if isinstance(goal, ErrorLimit) else most_accurate(trials, goal, effort.plans)
    )
    check = Check(goal.option, found.met, found.summary, seconds=time.monotonic() - start)
    return found.plan, check, (effort.reduced,) if effort.reduced else ()


def _strongest(exact: Sequence[Outputs]) -> int:
    """The sample with the largest outputs: where a detector finds nothing, relative errors mean nothing."""

    def size(value: Array) -> float:
        finite = value[np.isfinite(value)] if is_float(value) else np.zeros(1)
        return float(np.linalg.norm(finite.astype(np.float64)))

    sizes = np.array([[size(value) for value in outputs.values()] for outputs in exact])
    largest = np.maximum(sizes.max(axis=0), np.finfo(np.float64).tiny)
    return int(np.argmax((sizes / largest).sum(axis=1)))
