"""Sets of nodes that single nodes' errors do not explain: residual streams, and nodes to keep out of FP32.

An FP32 sum gains little if its activation rounds to FP16 again before the next sum reads it. All sums with
their activations keep a whole stream unrounded (docs/accuracy.md#residual-streams).

Some nodes make an engine worse in FP32, because they undo a free repair of the rules or break a kernel
(docs/plans.md#nodes-that-are-worse-in-fp32). An emulation with FP32 sums does not show that:

- A norm in FP32 takes the residual sums that it reads into its kernel, so that the products before them sum
  in FP16 again.
- Attention with a product, a mask or the scaling of Q and K in FP32 becomes several kernels.
"""

from __future__ import annotations

from functools import partial
from itertools import chain

from rewriter.hazards.planning.costs import Prices
from rewriter.hazards.planning.free_fp32 import RULE
from rewriter.hazards.planning.islands import is_residual_sum
from rewriter.hazards.survey import Survey
from rewriter.ir.graph.fusion import elementwise_after, kernel_results, reduces
from rewriter.ir.graph.ops import ELEMENTWISE
from rewriter.ir.plan import Plan, node_key


def residual_streams(survey: Survey, prices: Prices, plan: Plan) -> list[str]:
    """Keys of the residual sums that `plan` does not keep, each with its activation, cheapest first.

    A residual sum adds computed tensors. Its activation ends at the next sum. Layers add similar errors, so
    the sums of small tensors gain most for their cost.
    """
    kept, extra = plan.fp32 | plan.bf16, prices.extra
    sums: list[list[str]] = []
    is_sum = partial(is_residual_sum, survey)
    for node in filter(is_sum, survey.nodes):
        nodes = (node, *elementwise_after(survey, node.output[0], stop=is_sum))
        sums.append([key for key in (node_key(survey.scope, n) for n in nodes) if key not in kept])
    known = (found for found in sums if all(key in extra for key in found))
    return list(chain.from_iterable(sorted(known, key=lambda keys: sum(extra[key] for key in keys))))


def taking_sums(survey: Survey, plan: Plan) -> frozenset[str]:
    """Keys of the norms and reductions that read an FP32 epilogue of `plan` through elementwise nodes."""
    epilogues = frozenset(d.key for d in plan.decisions if d.rule == RULE)
    results = kernel_results(
        survey.nodes,
        begins=lambda n: node_key(survey.scope, n) in epilogues,
        belongs=lambda n: n.op_type in ELEMENTWISE or n.op_type == "Split",
        source=survey.source,
    )
    taking = (
        node_key(survey.scope, node)
        for node in survey.nodes
        if reduces(node) and any(survey.source(name) in results for name in node.input if name)
    )
    return frozenset(taking) - plan.fp32 - plan.bf16


def in_attention(prices: Prices, plan: Plan) -> frozenset[str]:
    """Keys of the nodes of fused attention that the rules do not keep; FP32 there breaks its kernel."""
    broken = (one for one in prices.attentions if one.us > 0.0)  # else the target fuses any types
    return frozenset().union(*(one.nodes | one.inside for one in broken)) - plan.fp32 - plan.bf16
