"""Plans that are searched: the cheapest that is accurate enough, the most accurate in a budget, the fastest.

The search starts from the rules' plan. Without a GPU it judges plans by emulation and recorded costs, node by
node (`cheapest`, `within`); with one it builds and runs them, in groups of nodes (`groups`, `rounds`).
"""

from __future__ import annotations

from rewriter.plan import Plan
from rewriter.search.cheapest import cheapest
from rewriter.search.choice import Choice, Group
from rewriter.search.evaluate import Emulator, Evaluator, Measured, Problem
from rewriter.search.frontier import frontier
from rewriter.search.goal import Aim, Budget, Fastest, Found, Goal, most_emulations
from rewriter.search.groups import groups
from rewriter.search.rounds import by_measurement
from rewriter.search.trials import Trials
from rewriter.search.within import most_accurate

__all__ = [
    "Aim",
    "Budget",
    "Choice",
    "Emulator",
    "Evaluator",
    "Fastest",
    "Found",
    "Goal",
    "Group",
    "Measured",
    "Problem",
    "Trials",
    "begin",
    "by_measurement",
    "frontier",
    "groups",
    "most_accurate",
    "most_emulations",
    "reach",
    "search",
]


def begin(problem: Problem, plan: Plan, aim: Aim) -> Trials:
    """The trials that a search for `aim` and a frontier share.

    Args:
        problem: The model after the structural passes, the samples and what the original gives.
        plan: The rules' one.
    """
    return Trials(problem, plan, aim.measure, f"added by the search for {aim}")


def search(problem: Problem, plan: Plan, aim: Goal | Budget) -> Found:
    """The plan that reaches the aim, by emulation and recorded costs; arguments as for `begin`.

    Raises:
        ArithmeticRunError: ONNX Runtime cannot run the model.
    """
    return reach(begin(problem, plan, aim), aim)


def reach(trials: Trials, aim: Goal | Budget) -> Found:
    """As `search`, on trials that others may have begun."""
    return cheapest(trials, aim) if isinstance(aim, Goal) else most_accurate(trials, aim)
