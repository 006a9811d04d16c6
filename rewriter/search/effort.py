"""How much emulation a model can afford: large ones get FP32 sums, fewer samples and fewer plans.

By the size of the model and not by the clock, so that the same model gets the same plan everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rewriter.costs import products
from rewriter.emulation import Accumulation
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
        problem: With as many samples, and such sums, as it can afford.
        most: Plans that are evaluated for a budget.
        told: What is less than was asked for; "" if nothing is.
    """

    problem: Problem
    most: int = MOST
    told: str = ""


def affordable(problem: Problem) -> Effort:
    """Give up samples first, all but one, then FP16 sums for samples, then plans."""
    shapes = {name: found.shape for name, found in problem.facts.main.items()}
    count = sum(products(node, shapes)[1] for node in problem.model.proto.graph.node if node.output)
    asked, given = problem.accumulation, len(problem.samples)
    slow = asked == "fp16" and FP16_SUMS * count <= FULL
    one = FP16_SUMS * count if slow else count
    samples = max(1, min(given, int(FULL // one))) if one else given
    accumulation: Accumulation = asked if slow else "fp32"
    most = MOST if one <= FULL else FEWEST
    told = []
    if samples < given:
        told.append(f"{samples} of {given} samples")
    if accumulation != asked:
        told.append("FP32 sums")
    if most < MOST:
        told.append(f"{most} plans")
    cut = replace(
        problem,
        samples=problem.samples[:samples],
        expected=problem.expected[:samples],
        accumulation=accumulation,
    )
    words = f"the search emulated with {', '.join(told)}: the model is large" if told else ""
    return Effort(cut, most, words)
