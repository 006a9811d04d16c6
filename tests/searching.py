"""Searches by emulation for tests."""

from __future__ import annotations

import math

from rewriter.plan import Plan
from rewriter.search.effort import MOST
from rewriter.search.goal import Budget, ErrorLimit, Found, Goal
from rewriter.search.problem import Problem
from rewriter.search.run import reach
from rewriter.search.trials import Trials


def begin(problem: Problem, plan: Plan, goal: Goal) -> Trials:
    """Trials that a search for `goal` and a frontier share."""
    return Trials(problem, plan, goal.measure, f"added by the search for {goal}")


def reached(trials: Trials, goal: ErrorLimit | Budget) -> Found:
    return reach(trials, goal, MOST)


def most_emulations(nodes: int) -> int:
    """Upper bound of `Found.emulations`: 4 to begin with, bisection, and three passes of halving."""
    return 4 + 7 * max(1, math.ceil(math.log2(nodes + 1)))
