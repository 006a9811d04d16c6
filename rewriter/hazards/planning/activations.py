"""Activations after ConvTransposes in FP32, where that costs nothing.

A ConvTranspose of stride 1 sums in FP32, but rounds before and after it adds its bias, and an activation in
FP16 rounds again. With the activation in FP32, all of them are one kernel that rounds once, in the same time
(docs/accuracy.md#activations-after-convtransposes). A residual sum in FP32 is not free: the kernel reads and
writes more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onnx import NodeProto

from rewriter.hazards import Hazard
from rewriter.hazards.accumulation import sums_in_fp32
from rewriter.hazards.planning.free_fp32 import RULE
from rewriter.hazards.planning.planner import LOW_TYPES, replanned
from rewriter.hazards.survey import PrecisionRequest, Survey
from rewriter.ir.base import Target
from rewriter.ir.graph.fusion import elementwise_after, is_plain_transpose
from rewriter.ir.model import Model, facts, walk_graphs
from rewriter.ir.plan import Plan

PROBE = "conv-transpose-epilogue"
"""Probe: does a ConvTranspose stay unrounded for an activation in FP32? `fp16` means no."""

_REASON = "the ConvTranspose before it is not rounded for it, at no cost"


def refusals(target: Target) -> Iterator[str]:
    """One sentence if `rewriter probe` switched the rule off for the target."""
    if target.answers.get(PROBE) == "fp16":
        yield (
            f"activations after ConvTransposes stay FP16: `rewriter probe` found that on {target} a "
            "ConvTranspose is rounded even where they are FP32"
        )


def extend_over_activations(model: Model, plan: Plan, target: Target) -> Plan:
    """`plan` with the nodes that compute elementwise from a ConvTranspose's result and constants alone.

    Nothing is added where anything else reads the result, where a quantised tensor takes part (that was not
    measured), or on a target that was not measured (`rewriter probe`) to sum a ConvTranspose in FP32.
    The rules of `planner` cannot do it: they run before the pass transpose-convs makes ConvTransposes.
    """
    if plan.precision != "fp16" or target.answers.get(PROBE) == "fp16" or not _has_any(model):
        return plan
    settings = PrecisionRequest(LOW_TYPES[plan.precision], plan.io, target=target)
    return replanned(model, facts.infer(model), plan, settings, _extend)


def _has_any(model: Model) -> bool:
    """True if there is a ConvTranspose of stride 1."""
    return any(is_plain_transpose(node) for graph in walk_graphs(model.proto.graph) for node in graph.node)


def _extend(survey: Survey, found: dict[int, Hazard]) -> None:
    for node in survey.nodes:
        if is_plain_transpose(node) and id(node) not in found and sums_in_fp32(survey, node):
            activation = elementwise_after(survey, node.output[0])
            if not _is_quantised(survey, node, activation):
                for reader in activation:
                    found.setdefault(id(reader), Hazard(reader, RULE, _REASON, node.output[0]))


def _is_quantised(survey: Survey, conv: NodeProto, activation: Sequence[NodeProto]) -> bool:
    """True if a ConvTranspose reads a dequantised tensor, or its activation is quantised."""
    producers = (survey.producer(name) for name in conv.input if name)
    if any(producer is not None and producer.op_type == "DequantizeLinear" for producer in producers):
        return True
    readers = (reader for node in activation for _, reader in survey.readers(node.output[0]))
    return any(reader.op_type == "QuantizeLinear" for reader in readers)
