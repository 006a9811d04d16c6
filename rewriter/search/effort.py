"""How much emulation a model can afford: large ones get FP32 sums, fewer samples and fewer plans.

By the size of the model and not by the clock, so that the same model gets the same plan everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rewriter.emulation import Accumulation
from rewriter.graph.fusion import is_plain_transpose
from rewriter.model import Model
from rewriter.model.facts import Facts
from rewriter.planning.costs.node_times import products
from rewriter.search.evaluator import Problem

FP16_SUMS = 8.0
"""How many times longer an emulation with FP16 sums takes, at most (README.md)."""

FULL = 4e10
"""Multiply-adds of one evaluation that are worth its time: some 10 s of one core, which emulates 4e9 (a ViT)
to 1.5e10 (Whisper's encoder) a second."""

MOST, FEWER, FEWEST = 12, 5, 3
"""Plans that a budget's search evaluates: of small models, of large ones, and beyond `HUGE`."""

HUGE = 8 * FULL
"""Multiply-adds of one evaluation with FP16 sums, from which on plans are `FEWEST`."""


@dataclass(frozen=True)
class Effort:
    """Samples, sums and plans that a search by emulation evaluates.

    Attributes:
        samples: How many.
        accumulation: Type of the sums; of a budget's search those of the ranking alone.
        most: Plans that are evaluated for a budget.
        reduced: What is less than requested, for the user; "" if nothing is.
    """

    samples: int
    accumulation: Accumulation
    most: int = MOST
    reduced: str = ""

    def of(self, problem: Problem) -> Problem:
        """The problem with so many samples, and such sums."""
        samples, expected = problem.samples[: self.samples], problem.expected[: self.samples]
        return replace(problem, samples=samples, expected=expected, accumulation=self.accumulation)


def for_tolerance(model: Model, facts: Facts, given: int, requested: Accumulation) -> Effort:
    """Give up samples first, all but one, then FP16 sums for samples: there are many plans to evaluate.

    Args:
        given: How many samples there are.
        requested: How sums are to be emulated.
    """
    exact, summed = _multiply_adds(model, facts), _multiply_adds(model, facts, FP16_SUMS)
    slow = requested == "fp16" and summed <= FULL
    one = summed if slow else exact
    samples, sums = _affordable(given, one), requested if slow else "fp32"
    return Effort(samples, sums, MOST, _reduced(samples, given, "" if sums == requested else "FP32 sums"))


def for_budget(model: Model, facts: Facts, given: int) -> Effort:
    """Give up samples first, then FP16 sums in the ranking, then plans; plans are judged with FP16 sums."""
    one = _multiply_adds(model, facts, FP16_SUMS)
    samples, small = _affordable(given, one), one <= FULL
    most = MOST if small else FEWER if one <= HUGE else FEWEST
    less = "" if small else f"a ranking with FP32 sums, {most} plans"
    return Effort(samples, "fp16" if small else "fp32", most, _reduced(samples, given, less))


def _multiply_adds(model: Model, facts: Facts, times: float = 1.0) -> float:
    """Those of one inference; of products whose sums are emulated in FP16, `times` as many."""
    shapes = {name: found.shape for name, found in facts.main.items()}
    return sum(
        products(node, shapes)[1] * (1.0 if is_plain_transpose(node) else times)
        for node in model.proto.graph.node
        if node.output
    )


def _affordable(given: int, one: float) -> int:
    """Samples, of `one` multiply-adds each, that are worth the time; one at least."""
    return max(1, min(given, int(FULL // one))) if one else given


def _reduced(samples: int, given: int, less: str) -> str:
    words = [f"{samples} of {given} samples"] if samples < given else []
    words += [less] if less else []
    return f"the search emulated with {', '.join(words)}: the model is large" if words else ""
