"""fuse-rms-norm: replaces a decomposed RMSNorm by RMSNormalization, or reports it as one unit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rewriter.ir.base import Change, Context, Event, Exactness, GraphPass, Refusal, Requires, Target
from rewriter.ir.graph import GraphEditor, open_graphs
from rewriter.ir.model import Model, facts
from rewriter.ir.patterns.norms import Norm, find_norms, frame, replace

MAPPED_FROM = {"tensorrt": (10, 15), "tensorrt-rtx": (1, 6)}
"""First releases known to map RMSNormalization: TensorRT by its changelog, TensorRT-RTX was measured."""


@dataclass(frozen=True)
class FuseRmsNorm(GraphPass):
    """The mean of squares of an RMSNorm overflows FP16 from x = 256 on; the operator computes in FP32 inside.

    RMSNormalization came with opset 23, which few TensorRT releases parse. The pass writes it only if both
    the model and the run have that opset. Otherwise it reports the norm as one unit, which becomes one FP32
    island. So it does with an L2 normalisation (torch.nn.functional.normalize).

    Declines:
        - a run below opset 23
        - an L2 normalisation, which divides by the root of a sum: no ONNX operator does
        - a norm of which an inner tensor is used elsewhere or is a graph output
        - an epsilon outside the root or as a lower bound, sums that are not means, float64
        - axes that are not the last ones, or of unknown size when there is no scale
    """

    name = "fuse-rms-norm"
    requires = Requires(opset=23)  # from there on it has RMSNormalization
    exactness = Exactness(1e-5, "FP32 sums in another order; at most 4.1e-7 measured on real exports")
    before = """
        <ir_version: 11, opset_import: ["" : 23]>
        g (float[2,8,64] x, float[64] scale) => (float[2,8,64] y)
        <float two = {2.0}, float epsilon = {0.000001}, int64[1] last = {-1}> {
            square = Pow(x, two)
            mean = ReduceMean(square, last)
            shifted = Add(mean, epsilon)
            root = Sqrt(shifted)
            inverse = Reciprocal(root)
            normal = Mul(x, inverse)
            y = Mul(scale, normal)
        }"""
    after = """
        <ir_version: 11, opset_import: ["" : 23]>
        g (float[2,8,64] x, float[64] scale) => (float[2,8,64] y) {
            y = RMSNormalization <axis = -1, epsilon = 0.000001> (x, scale)
        }"""

    def opset_for(self, model: Model, target: Target) -> int:
        """Returns 23 where the model writes out RMSNorms and the target is known to map the operator."""
        newest = not target.version and target.library == "tensorrt-rtx"  # of unknown version, a new one
        if not newest and target.version < MAPPED_FROM[target.library]:
            return 0
        norms = (norm for graph in open_graphs(model, facts.infer(model)) for norm in find_norms(graph))
        return self.requires.opset if any(n.kind == "rms-norm" and n.blocked is None for n in norms) else 0

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        for norm in find_norms(graph):
            if norm.kind != "layer-norm":
                yield from _fuse(graph, norm, context)


def _fuse(graph: GraphEditor, norm: Norm, context: Context) -> Iterator[Event]:
    size = len(norm.nodes)
    reason = _refused(graph, norm, context) or replace(graph, norm, "RMSNormalization")
    if reason:
        yield Refusal(norm.name, f"{reason}: its {size} nodes stay one unit, to be one FP32 island")
        return
    yield Change(norm.name, f"{size} nodes became RMSNormalization")
    if norm.remark:
        yield norm.remark


def _refused(graph: GraphEditor, norm: Norm, context: Context) -> str | None:
    if norm.kind == "l2-normalize":
        return "it divides by the root of a sum, which no ONNX operator does"
    if norm.blocked:
        return norm.blocked
    if context.opset < FuseRmsNorm.requires.opset:
        return f"RMSNormalization needs opset {FuseRmsNorm.requires.opset}, the run allows {context.opset}"
    if not frame(graph, norm).trailing:
        return f"it normalises axes {list(norm.axes)}, not the last ones"
    return None
