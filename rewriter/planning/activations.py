"""Activations in FP32 behind ConvTransposes, where that costs nothing.

A ConvTranspose of stride 1 sums in FP32 on the GPU that was measured (pass transpose-convs), but it rounds
the sum before it adds the bias, and behind it again; an activation in FP16 rounds once more for each of its
operators. With the activation in FP32, between Casts, sum, bias and activation are one kernel that rounds
at its end, in the same time. Chains of four layers on one H200 with TensorRT-RTX 1.6.1 erred by 4.4e-4
instead of 5.6e-4 (Relu), and by 5.5e-4 instead of 8.3e-4 (SiLU); a ResNet took 328.6 us instead of 335.1,
an RT-DETR 2085 instead of 2100 (docs/accuracy.md). A residual sum in FP32 is not free: the kernel reads and
writes more, and a ResNet with all of them so took 8 % longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from onnx import NodeProto

from rewriter.base import Target
from rewriter.graph.fusion import is_plain_transpose
from rewriter.graph.ops import ELEMENTWISE
from rewriter.hazards import Hazard
from rewriter.hazards.accumulation import sums_in_fp32
from rewriter.hazards.survey import PrecisionRequest, Survey
from rewriter.model import Model, facts, walk_graphs
from rewriter.plan import Plan
from rewriter.planning.epilogues import RULE
from rewriter.planning.planner import LOW_TYPES, replanned

PROBE = "conv-transpose-epilogue"
"""Who asks the GPU whether a ConvTranspose is left unrounded for an activation in FP32; `fp16` is a no."""

_REASON = "the ConvTranspose before it is not rounded for it, at no cost"


def refusals(target: Target) -> Iterator[str]:
    """That the target is known not to do it, in a sentence."""
    if target.answers.get(PROBE) == "fp16":
        yield (
            f"activations behind ConvTransposes stay FP16: `rewriter probe` found that on {target} a "
            "ConvTranspose is rounded even where they are FP32"
        )


def extend_over_activations(model: Model, plan: Plan, target: Target) -> Plan:
    """`plan` with what is computed elementwise of a ConvTranspose's result and constants alone.

    Where anything else reads the result, too, nothing is added, nor where the target was not measured
    (`rewriter probe`) to sum a ConvTranspose in FP32. What is quantised was not measured: it stays as it is.
    The rules cannot do it: when they plan, those of the pass transpose-convs are Convs.
    """
    if plan.precision != "fp16" or target.answers.get(PROBE) == "fp16" or not _has_any(model):
        return plan
    settings = PrecisionRequest(LOW_TYPES[plan.precision], plan.io, target=target)
    return replanned(model, facts.infer(model), plan, settings, _extend)


def _has_any(model: Model) -> bool:
    """Whether there is a ConvTranspose of stride 1: without, nobody needs to look at the model."""
    return any(is_plain_transpose(node) for graph in walk_graphs(model.proto.graph) for node in graph.node)


def _extend(survey: Survey, found: dict[int, Hazard]) -> None:
    for node in survey.nodes:
        if is_plain_transpose(node) and id(node) not in found and sums_in_fp32(survey, node):
            activation = computed_of(survey, node.output[0])
            if not _is_quantised(survey, node, activation):
                for reader in activation:
                    found.setdefault(id(reader), Hazard(reader, RULE, _REASON, node.output[0]))


def _is_quantised(survey: Survey, conv: NodeProto, activation: Sequence[NodeProto]) -> bool:
    """Whether a ConvTranspose reads what is dequantised, or its activation is quantised."""
    producers = (survey.producer(name) for name in conv.input if name)
    if any(producer is not None and producer.op_type == "DequantizeLinear" for producer in producers):
        return True
    readers = (reader for node in activation for _, reader in survey.readers(node.output[0]))
    return any(reader.op_type == "QuantizeLinear" for reader in readers)


def _none(_: NodeProto) -> bool:
    return False


def computed_of(survey: Survey, tensor: str, ends: Callable[[NodeProto], bool] = _none) -> list[NodeProto]:
    """The elementwise nodes that compute of a tensor and constants alone; none if anything else reads it.

    What `ends` says does not belong to them, nor what is behind it.
    """
    inside, kept, stack = {tensor}, dict[int, NodeProto](), [tensor]
    while stack:
        for _, reader in survey.readers(stack.pop()):
            computed = {survey.source(name) for name in reader.input if not survey.is_constant(name)}
            new = reader.op_type in ELEMENTWISE and id(reader) not in kept and not ends(reader)
            if new and computed <= inside:
                kept[id(reader)] = reader
                inside.update(reader.output)
                stack.extend(reader.output)
    handed_out = any(survey.graph.is_output(name) for name in survey.aliases(tensor))
    alone = all(id(reader) in kept for _, reader in survey.readers(tensor))
    return list(kept.values()) if alone and not handed_out else []
