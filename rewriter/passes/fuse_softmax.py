"""fuse-softmax: replaces a Softmax written in small operators by the operator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rewriter.ir.base import Change, Context, Event, Exactness, GraphPass, Refusal, Requires
from rewriter.ir.graph import GraphEditor
from rewriter.ir.patterns.softmax import find_softmax


@dataclass(frozen=True)
class FuseSoftmax(GraphPass):
    """JAX and older Keras write Softmax as Exp over its sum, which hides attention from TensorRT.

    FP16 then rounds the exponentials and their sum, too. LogSoftmax is treated alike. Exponentials without
    the largest value subtracted first overflow FP16 beyond 11.09; those inside the operator never do
    (docs/accuracy.md#as-flax-writes-it).

    Declines:
        - an inner tensor that is used elsewhere or is a graph output
        - a sum over several axes, or over others than the largest value
        - statistics that are expanded beyond the input, or rounded inside
    """

    name = "fuse-softmax"
    requires = Requires(opset=13)  # before, Softmax flattened all axes from `axis` on
    exactness = Exactness(1e-5, "FP32 sums in another order, and exp(x - max) for exp(x): some ulps")
    before = """
        g (float[2,8] x) => (float[2,8] y) <int64[1] axis = {1}> {
            peak = ReduceMax<axes = [1]>(x)
            shifted = Sub(x, peak)
            e = Exp(shifted)
            total = ReduceSum(e, axis)
            y = Div(e, total)
        }"""
    after = """
        g (float[2,8] x) => (float[2,8] y) {
            y = Softmax<axis = 1>(x)
        }"""

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        for found in list(find_softmax(graph)):
            if found.blocked is not None or found.axis is None:
                yield Refusal(found.name, f"stays written out: {found.blocked}")
                continue
            graph.substitute(
                found.output, graph.make(found.op, [found.input], [found.output], axis=found.axis)
            )
            yield Change(found.name, f"{len(found.nodes)} nodes became {found.op}")
