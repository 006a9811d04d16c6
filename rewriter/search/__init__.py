"""Plans that are searched: the cheapest that is accurate enough, the most accurate in a budget, the frontier.

The search starts from the rules' plan and asks an `Evaluator` what plans are worth; without a GPU that is
emulation and recorded costs.
"""

from __future__ import annotations

from rewriter.plan import Plan
from rewriter.search.cheapest import cheapest
from rewriter.search.evaluate import Emulator, Evaluator, Problem
from rewriter.search.frontier import frontier
from rewriter.search.goal import Budget, Found, Goal, most_emulations
from rewriter.search.trials import Trials
from rewriter.search.within import most_accurate

__all__ = [
    "Budget",
    "Emulator",
    "Evaluator",
    "Found",
    "Goal",
    "Problem",
    "Trials",
    "begin",
    "frontier",
    "most_emulations",
    "reach",
    "search",
]


def begin(problem: Problem, plan: Plan, goal: Goal | Budget, evaluator: Evaluator | None = None) -> Trials:
    """The trials that a search for `goal` and a frontier share.

    Args:
        problem: The model after the structural passes, the samples and what the original gives.
        plan: The rules' one.
        evaluator: Who judges plans; None: emulation and recorded costs. Which nodes are tried first is
            always told by emulation.
    """
    return Trials(problem, plan, goal.measure, f"added by the search for {goal}", evaluator)


def search(problem: Problem, plan: Plan, goal: Goal | Budget, evaluator: Evaluator | None = None) -> Found:
    """The plan that reaches the goal; arguments as for `begin`.

    Raises:
        ArithmeticRunError: ONNX Runtime cannot run the model.
    """
    return reach(begin(problem, plan, goal, evaluator), goal)


def reach(trials: Trials, goal: Goal | Budget) -> Found:
    """As `search`, on trials that others may have begun."""
    return cheapest(trials, goal) if isinstance(goal, Goal) else most_accurate(trials, goal)
