"""Ranges of the original along its depth, for the pages of `verify` and `locate`."""

from __future__ import annotations

from onnx import TensorProto

from rewriter.ir.errors import ArithmeticRunError
from rewriter.ir.model import Model, walk_graphs
from rewriter.ir.model import facts as tensor_facts
from rewriter.jobs.scan import inlined
from rewriter.runtime.emulation import reference
from rewriter.runtime.inputs import Samples
from rewriter.runtime.ranges import measure
from rewriter.runtime.ranges.depth import Depth, along_depth

TYPES: dict[int, str] = {
    TensorProto.FLOAT16: "fp16",
    TensorProto.BFLOAT16: "bf16",
    TensorProto.FLOAT: "fp32",
    TensorProto.DOUBLE: "fp32",
}
"""Names of the types in a chart."""


def measured_depth(original: Model, other: Model, samples: Samples) -> Depth:
    """Returns the ranges of the original on the first sample, and the types that the other model has there.

    Nothing is measured where ONNX Runtime cannot run the original.
    """
    whole = inlined(original)
    widened = reference(whole, tensor_facts.infer(whole))
    try:
        ranges = measure(widened, samples.first(1), tensor_facts.infer(widened))
    except ArithmeticRunError:
        return Depth()
    facts, types = tensor_facts.infer(other), dict[str, str]()
    for graph, known in zip(walk_graphs(other.proto.graph), facts.scopes, strict=True):
        made = (name for node in graph.node for name in node.output if name in known)
        types.update({name: TYPES[known[name].dtype] for name in made if known[name].dtype in TYPES})
    return Depth(along_depth(whole, ranges), types)
