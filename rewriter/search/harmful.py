"""Nodes that make an engine worse in FP32: they undo free repairs of the rules, or break a kernel.

Measured on one H200 with TensorRT-RTX 1.6.1: plans of a search by emulation with FP32 sums, which had all
norms in FP32, and masks and products of attention, erred more than the rules' plan and were slower (a Whisper
encoder 1.9e-3 in 2385 us, 1.3e-3 in 1602 us before; a ViT with massive activations 1.6e-3 in 1017 us, 1.4e-3
in 859 us before).

- A norm in FP32 takes the residual sums that it reads into its kernel, and the products before them sum in
  FP16 again (docs/accuracy.md).
- Attention with a product, a mask or the scaling of Q and K in FP32 is several kernels.

An emulation with FP32 sums sees only the roundings that FP32 saves there.
"""

from __future__ import annotations

from collections.abc import Iterator

from rewriter.graph.fusion import kernel_results, reduces
from rewriter.graph.ops import ELEMENTWISE
from rewriter.hazards.survey import Survey
from rewriter.plan import Plan
from rewriter.planning.free_fp32 import RULE
from rewriter.planning.planner import node_key
from rewriter.search.evaluator import Problem


def taking_sums(problem: Problem, plan: Plan) -> frozenset[str]:
    """Keys of the norms and reductions that what is elementwise leads to from an epilogue of `plan`.

    With FP16 sums an emulation shows what they undo.
    """
    survey = problem.survey(plan)
    epilogues = frozenset(d.key for d in plan.decisions if d.rule == RULE)
    return frozenset(_taking(survey, epilogues)) - plan.fp32 - plan.bf16


def in_attention(problem: Problem, plan: Plan) -> frozenset[str]:
    """Keys of the nodes of attention that are not in FP32 by the rules: in it, they make it several kernels.

    What that costs was up to nine times its estimate: only a measurement on an engine can tell it.
    """
    broken = (one for one in problem.prices.attentions if one.us > 0.0)  # else the target fuses any types
    return frozenset().union(*(one.nodes | one.inside for one in broken)) - plan.fp32 - plan.bf16


def _taking(survey: Survey, epilogues: frozenset[str]) -> Iterator[str]:
    results = kernel_results(
        survey.nodes,
        begins=lambda n: node_key(survey.scope, n) in epilogues,
        belongs=lambda n: n.op_type in ELEMENTWISE or n.op_type == "Split",
        source=survey.source,
    )
    for node in survey.nodes:
        if reduces(node) and any(survey.source(name) in results for name in node.input if name):
            yield node_key(survey.scope, node)
