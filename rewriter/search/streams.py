"""The residual streams of a network in FP32, which single nodes cannot be ranked for.

A sum in FP32 gains little where its activation rounds to FP16 again before the next sum reads it;
all sums with their activations keep a stream unrounded from one end to the other. On one H200 with
TensorRT-RTX 1.6.1 a RT-DETR with them erred by 3.8e-3 instead of 5.5e-3, for 15 % more latency
(docs/accuracy.md).
"""

from __future__ import annotations

from functools import partial
from itertools import chain

from rewriter.graph.fusion import elementwise_after
from rewriter.plan import Plan
from rewriter.planning.islands import is_residual_sum
from rewriter.planning.planner import node_key
from rewriter.search.evaluator import Problem


def residual_streams(problem: Problem, plan: Plan) -> list[str]:
    """Keys of the residual sums that `plan` does not keep, each with its activation, cheapest first.

    A residual sum is one of several computed tensors; its activation ends at the next one. Layers err alike,
    so those of small tensors gain most for their cost.
    """
    survey = problem.survey(plan)
    kept, extra = plan.fp32 | plan.bf16, problem.prices.extra
    sums: list[list[str]] = []
    is_sum = partial(is_residual_sum, survey)
    for node in filter(is_sum, survey.nodes):
        nodes = (node, *elementwise_after(survey, node.output[0], stop=is_sum))
        sums.append([key for key in (node_key(survey.scope, n) for n in nodes) if key not in kept])
    known = (found for found in sums if all(key in extra for key in found))
    cheapest = sorted(known, key=lambda keys: sum(extra[key] for key in keys))
    return list(chain.from_iterable(cheapest))
