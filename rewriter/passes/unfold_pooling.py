"""unfold-pooling: replaces an AveragePool of one channel by the mean over axes of its windows."""

from collections.abc import Iterator
from dataclasses import dataclass

from onnx import NodeProto

from rewriter.ir.graph import GraphEditor, attribute, display_name, is_op
from rewriter.ir.graph.weights import Replacement
from rewriter.ir.plan import NodePatterns
from rewriter.passes.base import Change, Context, Event, Exactness, GraphPass, Requires, refused

AXES = [3, 5]
"""Of the elements of a window, once the height and width are split."""


@dataclass(frozen=True)
class UnfoldPooling(GraphPass):
    """Optical flow and stereo pool a map of correlations for each pixel, and TensorRT is slow at one channel.

    An AveragePool whose windows partition the image is a mean over two axes of [N, 1, H / h, h, W / w, w]. On
    an H200 1,024 maps of 32 x 32 took 13.9 us instead of 77.7, and four shapes 0.14 to 0.24 of their time. Of
    four channels it gains nothing, of many it loses (docs/accuracy.md#average-pools-of-one-channel).

    Skipped without a report: more channels than one, windows that overlap or leave gaps, other ranks.

    Declines:
        - a height or width that is not known
        - padding, dilation, and ceil_mode where the windows leave a remainder
    """

    requires = Requires(opset=10)  # from there on Slice takes inputs
    exactness = Exactness(1e-6, "ONNX Runtime orders the same sums differently")
    example = """
        -g (float[N,1,4,6] x) => (float[N,1,2,3] y) {
        -    y = AveragePool<kernel_shape = [2, 2], strides = [2, 2]>(x)
        +g (float[N,1,4,6] x) => (float[N,1,2,3] y) <int64[6] split = {0, 1, 2, 2, 3, 2}> {
        +    windows = Reshape(x, split)
        +    y = ReduceMean<axes = [3, 5], keepdims = 0>(windows)
         }"""

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        for node in graph.nodes:
            if not is_op(node, "AveragePool"):
                continue
            shape, kernel = graph.shape(node.input[0]) or (), attribute(node, "kernel_shape", [])
            one = len(shape) == 4 and shape[1] == 1
            if one and kernel == attribute(node, "strides", []) and max(kernel) > 1:
                sizes = [size for size in shape[2:] if isinstance(size, int)]
                refusal = refused(node, "it stays an AveragePool", _reason_against(node, sizes, context.kept))
                yield refusal or _write(Replacement(graph, node, "unfolded"), sizes, kernel)


def _reason_against(node: NodeProto, sizes: list[int], kept: NodePatterns) -> str | None:
    if len(sizes) < 2:
        return f"the height or width of {node.input[0]} is not known"
    if attribute(node, "auto_pad", "NOTSET") not in ("NOTSET", "VALID") or any(attribute(node, "pads", [0])):
        return "it pads"
    if any(step != 1 for step in attribute(node, "dilations", [1])):
        return "its windows are dilated"
    kernel = attribute(node, "kernel_shape", [])
    if any(size < step for size, step in zip(sizes, kernel, strict=True)):
        return "its windows are larger than the image"
    if attribute(node, "ceil_mode", 0) and any(size % step for size, step in zip(sizes, kernel, strict=True)):
        return "its last windows are smaller than the others"
    return kept.reason(node)


def _write(new: Replacement, sizes: list[int], kernel: list[int]) -> Change:
    counts = [size // step for size, step in zip(sizes, kernel, strict=True)]
    ends = [number * step for number, step in zip(counts, kernel, strict=True)]
    whole = "x" if ends == sizes else f"Slice(x, [0, 0], {ends}, [2, 3])"  # it drops the remainder
    windows = f"Reshape({whole}, {[0, 1, counts[0], kernel[0], counts[1], kernel[1]]})"
    mean = f"ReduceMean<axes = {AXES}, keepdims = 0>({windows})"
    if new.graph.model.opset >= 18:
        mean = f"ReduceMean<keepdims = 0>({windows}, {AXES})"
    new.replace_by(f"y0 = {mean}", x=new.node.input[0])
    return Change(display_name(new.node), f"a mean over windows of {kernel[0]} x {kernel[1]}")
