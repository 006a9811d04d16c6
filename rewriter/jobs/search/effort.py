"""Limits the emulation of a model that is slow to run: fewer samples, FP32 sums and fewer plans.

What one run of the original took decides, in processor time, so that the load of the machine does not count.
"""

from __future__ import annotations

from dataclasses import dataclass

from rewriter.ir.model import Model
from rewriter.jobs.search.goal import Budget, Goal
from rewriter.runtime.emulation import Accumulation
from rewriter.runtime.engines.this_machine import ENGINES
from rewriter.runtime.inputs import Samples
from rewriter.target.costs import products
from rewriter.target.fusion import is_plain_transpose

CUDA_WORK = 1e10
"""Multiply-adds of a sample from which references and ranges run with CUDA: a core needs 0.3 s for so many,
CUDA 0.5 s to start (benchmarks/README.md#references-on-cuda)."""

FP16_SUMS = 8.0
"""Largest ratio of the times of an emulation with FP16 sums and one with FP32 sums (README.md)."""

FULL_S = 10.0
"""CPU budget, in seconds, for one evaluation: a search needs dozens."""

MOST, FEWER = 12, 5
"""Plans that a search for a budget evaluates: for quick models, and for slow ones."""


@dataclass(frozen=True)
class RunCost:
    """Processor seconds of one emulation of one sample, with FP32 sums and with FP16 sums."""

    exact: float
    summed: float

    @classmethod
    def of(cls, model: Model, run_s: float) -> RunCost:
        """The cost of a model whose original took `run_s` processor seconds for one sample."""
        plain = _multiply_adds(model)
        ratio = _multiply_adds(model, FP16_SUMS) / plain if plain else 1.0
        return cls(run_s, run_s * ratio)

    def sums(self, requested: Accumulation, most_s: float) -> Accumulation:
        """Returns the requested type of sums, or FP32 where FP16 sums take more than `most_s`."""
        return requested if requested == "fp32" or self.summed <= most_s else "fp32"

    def samples(self, sums: Accumulation, most_s: float, most: int) -> int:
        """Returns how many samples take `most_s` at most: one at least, `most` at most."""
        one = self.summed if sums == "fp16" else self.exact
        return max(1, min(most, int(most_s // one))) if one else most


def pays_on_cuda(model: Model, samples: Samples) -> bool:
    """True if ONNX Runtime can use CUDA here, and a sample is enough work for that."""
    sized = None if ENGINES["onnxruntime-cuda"].obstacle() else model.at_sizes(samples.feeds(0))
    return sized is not None and _multiply_adds(sized) >= CUDA_WORK


def _multiply_adds(model: Model, times: float = 1.0) -> float:
    """Returns the multiply-adds of one inference; products with emulated FP16 sums count `times` as much."""
    shapes = {name: facts.shape for name, facts in model.facts().main.items()}
    return sum(
        products(node, shapes)[1] * (1.0 if is_plain_transpose(node) else times)
        for node in model.proto.graph.node
        if node.output
    )


@dataclass(frozen=True)
class Effort:
    """Samples, sums and plans that a search by emulation evaluates.

    `reduced` is a sentence for the user on the reductions, "" if there are none.
    """

    samples: int
    judging_sums: Accumulation
    ranking_sums: Accumulation
    plans: int = MOST
    reduced: str = ""


def affordable(goal: Goal, cost: RunCost, samples: int, requested: Accumulation) -> Effort:
    """Returns what a search for the goal can afford.

    A tolerance needs many evaluations: first fewer samples, down to one, then FP32 sums. A budget is always
    judged with FP16 sums: first fewer samples, then a ranking with FP32 sums and fewer plans.

    Args:
        samples: Number of samples that there are.
        requested: Type of the emulated sums for a tolerance.
    """
    budget, plans, less = isinstance(goal, Budget), MOST, ""
    wanted: Accumulation = "fp16" if budget else requested
    ranking = cost.sums(wanted, FULL_S)
    judging: Accumulation = "fp16" if budget else ranking
    if ranking != wanted:
        plans = FEWER
        less = f"a ranking with FP32 sums, {plans} plans" if budget else "FP32 sums"
    number = cost.samples(judging, FULL_S, samples)
    words = [f"{number} of {samples} samples"] * (number < samples) + [less] * bool(less)
    one = cost.summed if judging == "fp16" else cost.exact
    why = f"the search emulated with {', '.join(words)}: one costs some {one:.2g} s of a core"
    return Effort(number, judging, ranking, plans, why if words else "")
