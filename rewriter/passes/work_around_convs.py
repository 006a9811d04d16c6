"""work-around-convs: adds zeros, or isolates a Pad or Concat, which TensorRT-RTX gets wrong beside a Conv."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from rewriter.ir.graph import GraphEditor, attribute, display_name
from rewriter.ir.graph.match import optional_input, produced
from rewriter.ir.graph.weights import Replacement
from rewriter.passes.base import Change, Context, Event, GraphPass
from rewriter.target.quirks import affected, may_be_repaired_by, of_chains


@dataclass(frozen=True)
class WorkAroundConvs(GraphPass):
    """TensorRT-RTX computes some Convs wrongly, or crashes at them; a small change gives them another kernel.

    A bias of zeros cures pointwise FP16 Convs that are wrong without one, as in MobileNetV5 and at the end of
    MobileNetV3, or at which the build crashes. A Conv that writes into the larger image of a Pad or Concat
    shears it, in FP32, too: between Unsqueeze and Squeeze, the Pad or Concat is a kernel by itself. A Relu or
    Tanh of an FP32 image times another tensor is lost, but not with zeros added (docs/engines.md#convs).

    It follows `rewriter probe`: it acts where the target was wrong and not where it was right. Without probe
    results it acts for releases with the defect.
    """

    example = """
         g (float[1,4,2,2] x, float[4,4,1,1] w, float[2,2] k) => (float[1,2,4,2] y)
        -<int64[4] heads = {1, 2, 2, 4}> {
        -    c = Conv(x, w)
        +<int64[4] heads = {1, 2, 2, 4}, float[4] zeros = {0, 0, 0, 0}> {
        +    c = Conv(x, w, zeros)
             r = Reshape(c, heads)
             q = Transpose<perm = [0, 1, 3, 2]>(r)
             y = MatMul(q, k)
         }"""

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        for quirk in may_be_repaired_by(self.name, context.target):
            change = {"gaps": _by_itself, "scaled-image": _with_sum}.get(quirk.where, _with_bias)
            nodes = of_chains(graph, quirk, ("Conv",)) if change is _with_bias else affected(graph, quirk)
            for node in {id(node): node for node in nodes}.values():
                yield change(graph, node)


def _with_bias(graph: GraphEditor, conv: NodeProto) -> Event:
    sizes = graph.sizes(conv.input[1])
    assert sizes is not None  # the rows of the table ask for them
    conv.input.append("")
    zeros = graph.add_constant(f"{conv.output[0]}/zeros", np.zeros(sizes[0]), like=conv.input[1])
    graph.set_input(conv, 2, zeros)
    return Change(display_name(conv), "a bias of zeros")


def _with_sum(graph: GraphEditor, node: NodeProto) -> Event:
    """Adds a zero for each channel to the product that the node reads (one number is not known to help)."""
    index = next(i for i, name in enumerate(node.input) if produced(graph, name, "Mul", "Div"))
    product = node.input[index]
    _, channels, *axes = graph.shape(product) or (1, 1)
    zeros = np.zeros((1, channels if isinstance(channels, int) else 1, *(1 for _ in axes)))
    inputs = [product, graph.add_constant(f"{product}/zeros", zeros, like=product)]
    total = graph.tensor(f"{product}/sum", like=product)
    graph.insert(graph.make("Add", inputs, [total]), before=node)
    graph.set_input(node, index, total)
    return Change(display_name(node), "zeros are added before it")


def _by_itself(graph: GraphEditor, node: NodeProto) -> Event:
    """Pad or Concat with a first dimension of 1 more."""
    tensors = {f"x{index}": name for index, name in enumerate(node.input)}
    if node.op_type == "Concat":
        axis = attribute(node, "axis", 0)
        images = ", ".join(f"Unsqueeze({name}, [0])" for name in tensors)
        larger = f"Concat<axis = {axis + 1 if axis >= 0 else axis}>({images})"
    else:  # with constant values, and no axes (`gaps` in quirks.py)
        before, after = np.split(graph.value(node.input[1]), 2)
        value = ", x2" if optional_input(node, 2) else ""
        larger = f"Pad(Unsqueeze(x0, [0]), {[0, *before.tolist(), 0, *after.tolist()]}{value})"
    Replacement(graph, node).replace_by(f"y0 = Squeeze({larger}, [0])", **tensors)
    return Change(display_name(node), "a kernel of its own")
