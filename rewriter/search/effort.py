"""How much emulation a model can afford: large ones get FP32 sums, fewer samples and fewer plans.

By the size of the model and not by the clock, so that the same model gets the same plan everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rewriter.costs import products
from rewriter.emulation import Accumulation
from rewriter.facts import Facts
from rewriter.model import Model
from rewriter.search.evaluate import Problem

FP16_SUMS = 8.0
"""How many times longer an emulation with FP16 sums takes, at most (README.md)."""

FULL = 4e10
"""Multiply-adds of one evaluation that are worth its time: some 10 s of one core, which emulates 4e9 (a ViT)
to 1.5e10 (Whisper's encoder) a second."""

MOST, FEWEST = 12, 5
"""Plans that a budget's search evaluates, of small models and of large ones."""


@dataclass(frozen=True)
class Effort:
    """What a search by emulation evaluates.

    Attributes:
        samples: How many.
        most: Plans that are evaluated for a budget.
        told: What is less than was asked for; "" if nothing is.
    """

    samples: int
    accumulation: Accumulation
    most: int = MOST
    told: str = ""

    def of(self, problem: Problem) -> Problem:
        """The problem with so many samples, and such sums."""
        samples, expected = problem.samples[: self.samples], problem.expected[: self.samples]
        return replace(problem, samples=samples, expected=expected, accumulation=self.accumulation)


def affordable(model: Model, facts: Facts, given: int, asked: Accumulation) -> Effort:
    """Give up samples first, all but one, then FP16 sums for samples, then plans.

    Args:
        given: How many samples there are.
        asked: How sums are to be emulated.
    """
    shapes = {name: found.shape for name, found in facts.main.items()}
    count = sum(products(node, shapes)[1] for node in model.proto.graph.node if node.output)
    slow = asked == "fp16" and FP16_SUMS * count <= FULL
    one = FP16_SUMS * count if slow else count
    samples = max(1, min(given, int(FULL // one))) if one else given
    sums: Accumulation = asked if slow else "fp32"
    most = MOST if one <= FULL else FEWEST
    told = []
    if samples < given:
        told.append(f"{samples} of {given} samples")
    if sums != asked:
        told.append("FP32 sums")
    if most < MOST:
        told.append(f"{most} plans")
    words = f"the search emulated with {', '.join(told)}: the model is large" if told else ""
    return Effort(samples, sums, most, words)
