"""Limits the emulation of a model: large models get FP32 sums, fewer samples and fewer plans.

The size of the model decides, not the clock, so that a model gets the same plan on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rewriter.emulation import Accumulation
from rewriter.graph.fusion import is_plain_transpose
from rewriter.model import Model
from rewriter.model.facts import Facts
from rewriter.planning.costs.node_times import products
from rewriter.search.problem import Problem

FP16_SUMS = 8.0
"""Largest ratio of the times of an emulation with FP16 sums and one with FP32 sums (README.md)."""

FULL = 4e10
"""Most multiply-adds of one evaluation: some 10 s of one core, which emulates 4e9 (a ViT) to 1.5e10 (a
Whisper encoder) a second."""

MOST, FEWER, FEWEST = 12, 5, 3
"""Plans that a search for a budget evaluates: for small models, for large ones, and beyond `HUGE`."""

HUGE = 8 * FULL
"""Multiply-adds of one evaluation with FP16 sums, above which only `FEWEST` plans are evaluated."""


@dataclass(frozen=True)
class Effort:
    """Samples, sums and plans that a search by emulation evaluates.

    Attributes:
        samples: Number of samples.
        accumulation: Type of the sums; for a budget, of the sums in the ranking.
        most: Plans that are evaluated for a budget.
        reduced: Sentence for the user on the reductions; "" if there are none.
    """

    samples: int
    accumulation: Accumulation
    most: int = MOST
    reduced: str = ""

    def of(self, problem: Problem) -> Problem:
        """Returns the problem with these samples and sums."""
        samples, expected = problem.samples[: self.samples], problem.expected[: self.samples]
        return replace(problem, samples=samples, expected=expected, accumulation=self.accumulation)


def for_tolerance(model: Model, facts: Facts, given: int, requested: Accumulation) -> Effort:
    """Reduces the samples first, to one, then uses FP32 sums: a tolerance needs many evaluations.

    Args:
        given: Number of samples.
        requested: Type of the emulated sums.
    """
    exact, summed = _multiply_adds(model, facts), _multiply_adds(model, facts, FP16_SUMS)
    slow = requested == "fp16" and summed <= FULL
    one = summed if slow else exact
    samples, sums = _affordable(given, one), requested if slow else "fp32"
    return Effort(samples, sums, MOST, _reduced(samples, given, "" if sums == requested else "FP32 sums"))


def for_budget(model: Model, facts: Facts, given: int) -> Effort:
    """Reduces samples first, then FP16 sums in the ranking, then plans; plans are judged with FP16 sums."""
    one = _multiply_adds(model, facts, FP16_SUMS)
    samples, small = _affordable(given, one), one <= FULL
    most = MOST if small else FEWER if one <= HUGE else FEWEST
    less = "" if small else f"a ranking with FP32 sums, {most} plans"
    return Effort(samples, "fp16" if small else "fp32", most, _reduced(samples, given, less))


def _multiply_adds(model: Model, facts: Facts, times: float = 1.0) -> float:
    """Returns the multiply-adds of one inference; products with emulated FP16 sums count `times` as much."""
    shapes = {name: found.shape for name, found in facts.main.items()}
    return sum(
        products(node, shapes)[1] * (1.0 if is_plain_transpose(node) else times)
        for node in model.proto.graph.node
        if node.output
    )


def _affordable(given: int, one: float) -> int:
    """Returns how many samples of `one` multiply-adds each fit into `FULL`; at least one."""
    return max(1, min(given, int(FULL // one))) if one else given


def _reduced(samples: int, given: int, less: str) -> str:
    words = [f"{samples} of {given} samples"] if samples < given else []
    words += [less] if less else []
    return f"the search emulated with {', '.join(words)}: the model is large" if words else ""
