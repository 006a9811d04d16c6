"""pool-before-mean: lets windows of an image be pooled before the mean over all of it."""

from collections.abc import Iterator
from dataclasses import dataclass

from onnx import NodeProto, TensorProto

from rewriter.ir.graph import GraphEditor, display_name, is_op
from rewriter.passes.base import Change, Context, Event, Exactness, GraphPass, Requires, refused

WINDOWS = range(5, 9)
"""Sides of a window: of 3 x 3 nothing was gained, 6 x 6 and 8 x 8 gained."""

LEAST_CHANNELS = 32
"""Of few channels TensorRT's pooling is slow (docs/accuracy.md#average-pools-of-one-channel)."""

LEAST_ELEMENTS = 16 * 576 * 18 * 18
"""The smallest images whose mean gained, of all that were measured. A network with smaller ones lost."""


@dataclass(frozen=True)
class PoolBeforeMean(GraphPass):
    """Squeeze and excitation reads the mean of each channel, and TensorRT's sum over large images is slow.

    An AveragePool of windows of one size before it leaves few elements: on an H200 EfficientNet-B3 took
    2,259 us for 16 images instead of 2,790 (docs/accuracy.md#means-of-images). Small images gain nothing.

    Skipped without a report: means over other axes than height and width, and images of few channels or
    less than `least` elements.

    Options:
        least: Fewest elements of all images in the first sample; 0 for any.

    Declines:
        - a height or width that no window of 5 to 8 divides
    """

    least: int = LEAST_ELEMENTS

    requires = Requires(opset=7)
    exactness = Exactness(1e-6, "ONNX Runtime orders the same sums differently")
    example = """
        -g (float[16,576,18,24] x) => (float[16,576,1,1] y) {
        -    y = GlobalAveragePool(x)
        +g (float[16,576,18,24] x) => (float[16,576,1,1] y) {
        +    pooled = AveragePool<kernel_shape = [6, 8], strides = [6, 8]>(x)
        +    y = GlobalAveragePool(pooled)
         }"""

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        means = [(node, sizes) for node in graph.nodes if (sizes := _image(graph, node))]
        facts = graph.model.at_sizes(context.sample).facts().main if means else {}
        for node, sizes in means:
            image = facts.get(node.input[0])
            if (image.elements if image else 0) < self.least:
                continue
            window = [max((s for s in WINDOWS if size % s == 0), default=0) for size in sizes]
            unfit = None if all(window) else f"no window divides {sizes[0]} x {sizes[1]}"
            reason = unfit or context.kept.reason(node)
            yield refused(node, "its image is not pooled", reason) or _pool(graph, node, window)


def _image(graph: GraphEditor, node: NodeProto) -> list[int] | None:
    """Height and width of the image whose mean over height and width is the node's result."""
    if not is_op(node, "GlobalAveragePool", "ReduceMean"):
        return None
    if node.op_type == "ReduceMean" and sorted(a % 4 for a in graph.axes(node) or ()) != [2, 3]:
        return None
    shape = graph.shape(node.input[0]) or ()
    sizes = [size for size in shape[1:] if isinstance(size, int)]
    if len(shape) != 4 or len(sizes) != 3 or graph.dtype(node.input[0]) != TensorProto.FLOAT:
        return None
    return sizes[1:] if sizes[0] >= LEAST_CHANNELS else None


def _pool(graph: GraphEditor, node: NodeProto, window: list[int]) -> Change:
    image = node.input[0]
    pooled = graph.tensor(f"{node.output[0]}/pooled", dtype=graph.dtype(image))
    name = f"{display_name(node)}/AveragePool"
    pooling = graph.make("AveragePool", [image], [pooled], name=name, kernel_shape=window, strides=window)
    graph.insert(pooling, before=node)
    graph.set_input(node, 0, pooled)
    return Change(display_name(node), f"a mean after windows of {window[0]} x {window[1]}")
