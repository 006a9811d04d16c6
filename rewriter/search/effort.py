"""Limits the emulation of a model that is slow to run: fewer samples, FP32 sums and fewer plans.

What one run of the original took decides, in processor time, so that the load of the machine does not count.
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

FULL_S = 10.0
"""Most processor seconds of one evaluation: a search needs dozens."""

MOST, FEWER, FEWEST = 12, 5, 3
"""Plans that a search for a budget evaluates: for quick models, for slow ones, and beyond `HUGE_S`."""

HUGE_S = 8 * FULL_S
"""Processor seconds of one evaluation with FP16 sums, above which only `FEWEST` plans are evaluated."""


@dataclass(frozen=True)
class RunCost:
    """Processor seconds of one emulation of one sample, estimated from a run of the original.

    Attributes:
        exact: With FP32 sums.
        summed: With FP16 sums.
    """

    exact: float
    summed: float

    @classmethod
    def of(cls, model: Model, facts: Facts, run_s: float) -> RunCost:
        """The cost of a model whose original took `run_s` processor seconds for one sample."""
        plain = _multiply_adds(model, facts)
        ratio = _multiply_adds(model, facts, FP16_SUMS) / plain if plain else 1.0
        return cls(run_s, run_s * ratio)


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


def for_tolerance(cost: RunCost, given: int, requested: Accumulation) -> Effort:
    """Reduces the samples first, to one, then uses FP32 sums: a tolerance needs many evaluations.

    Args:
        given: Number of samples.
        requested: Type of the emulated sums.
    """
    sums = with_sums(cost, requested)
    one = cost.summed if sums == "fp16" else cost.exact
    samples = _affordable(given, one)
    return Effort(
        samples, sums, MOST, _reduced(samples, given, "" if sums == requested else "FP32 sums", one)
    )


def with_sums(cost: RunCost, requested: Accumulation, most_s: float = FULL_S) -> Accumulation:
    """Returns the requested type of sums, or FP32 where FP16 sums take more than `most_s`."""
    return requested if requested == "fp32" or cost.summed <= most_s else "fp32"


def for_budget(cost: RunCost, given: int) -> Effort:
    """Reduces samples first, then FP16 sums in the ranking, then plans; plans are judged with FP16 sums."""
    one = cost.summed
    samples, quick = _affordable(given, one), one <= FULL_S
    most = MOST if quick else FEWER if one <= HUGE_S else FEWEST
    less = "" if quick else f"a ranking with FP32 sums, {most} plans"
    return Effort(samples, "fp16" if quick else "fp32", most, _reduced(samples, given, less, one))


def _multiply_adds(model: Model, facts: Facts, times: float = 1.0) -> float:
    """Returns the multiply-adds of one inference; products with emulated FP16 sums count `times` as much."""
    shapes = {name: found.shape for name, found in facts.main.items()}
    return sum(
        products(node, shapes)[1] * (1.0 if is_plain_transpose(node) else times)
        for node in model.proto.graph.node
        if node.output
    )


def _affordable(given: int, one: float) -> int:
    """Returns how many samples of `one` second each fit into `FULL_S`; at least one."""
    return max(1, min(given, int(FULL_S // one))) if one else given


def _reduced(samples: int, given: int, less: str, one: float) -> str:
    words = [f"{samples} of {given} samples"] if samples < given else []
    words += [less] if less else []
    return (
        f"the search emulated with {', '.join(words)}: one costs some {one:.2g} s of a core" if words else ""
    )
