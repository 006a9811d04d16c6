"""isolate-clip: replaces a Clip after Conv, Gemm or MatMul by Max, or Relu, and Min."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from onnx import NodeProto

from rewriter.ir.graph import GraphEditor, display_name
from rewriter.ir.graph.match import optional_input
from rewriter.ir.graph.weights import Replacement
from rewriter.passes.base import Change, Context, Event, GraphPass, Refusal
from rewriter.target.quirks import may_be_repaired_by, of_chains


@dataclass(frozen=True)
class IsolateClip(GraphPass):
    """Some TensorRT releases fuse a Clip into the Conv or MatMul before it and lose a bound.

    TensorRT#3938 (Conv+Clip, 10.0.1 on L4) and TensorRT#4606 (MatMul-Add-Clip, 10.12 and 10.13) give wrong
    FP32 results. Max and Min are not fused, at no measurable cost (docs/engines.md#clip-after-a-product).
    TensorRT-RTX reads Max with 0 and Min as that Clip again, and loses the bound where a Mul or another
    operator follows in one kernel: there, Relu and Min are right. A Relu that is multiplied loses its
    product's bias there, and becomes a Max.

    It follows `rewriter probe`: it rewrites where the target was wrong and not where it was right. Without
    probe results it rewrites for TensorRT of an unknown version, or of one with the defect.

    Declines:
        - computed bounds: TensorRT does not fuse such a Clip
        - a Clip without bounds
    """

    example = """
         g (float[1,3,8,8] x, float[4,3,3,3] w) => (float[1,4,6,6] y)
         <float low = {0.0}, float high = {6.0}> {
             c = Conv(x, w)
        -    y = Clip(c, low, high)
        +    m = Max(c, low)
        +    y = Min(m, high)
         }"""

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        concerned = may_be_repaired_by(self.name, context.target)
        fused = {id(n): quirk for quirk in concerned for n in of_chains(graph, quirk, ("Clip", "Relu"))}
        for node in graph.nodes:
            if id(node) in fused:
                yield _isolate(graph, node, "Relu" if fused[id(node)].where == "from-zero" else "Max")


def _isolate(graph: GraphEditor, clip: NodeProto, lower: Literal["Max", "Relu"]) -> Event:
    if clip.op_type == "Relu":
        steps = [("Max", graph.add_constant(f"{clip.output[0]}/zero", 0.0, like=clip.input[0]))]
    else:
        steps = [(op, b) for op, index in ((lower, 1), ("Min", 2)) if (b := optional_input(clip, index))]
    if any(graph.constant(bound) is None for _, bound in steps):
        return Refusal(display_name(clip), "its bounds are computed: TensorRT does not fuse such a Clip")
    if not steps:
        return Refusal(display_name(clip), "it has no bounds")
    new, current = Replacement(graph, clip), clip.input[0]
    for index, (op, bound) in enumerate(steps):
        last = index == len(steps) - 1
        out = clip.output[0] if last else graph.tensor(f"{clip.output[0]}/{op}", like=clip.output[0])
        current = new.add(op, [current] if op == "Relu" else [current, bound], out)
    graph.remove(clip, keep=clip.output)
    return Change(display_name(clip), f"{clip.op_type} became " + " and ".join(op for op, _ in steps))
