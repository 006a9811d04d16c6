"""The windows of a Conv, and the conditions under which a pass may write the Conv another way."""

from dataclasses import dataclass

from onnx import NodeProto

from rewriter.ir.graph import GraphEditor, attribute, is_op, is_quantised
from rewriter.ir.graph.weights import layout_obstacle
from rewriter.ir.plan import NodePatterns

IMAGE_CHANNELS = 4
"""Most channels of an image: grey, RGB, RGBA; a latent of Stable Diffusion has as many. TensorRT-RTX pads
so few channels, and has no good kernel for them (docs/accuracy.md)."""


@dataclass(frozen=True)
class Windows:
    """The windows that a Conv with a constant weight reads, or that a ConvTranspose writes."""

    out: int  # channels of the result
    channels: int  # channels that are read
    kernel: tuple[int, ...]  # one for each spatial axis, as strides and dilations
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    sizes: tuple[int | str | None, ...]  # of the input's spatial axes; a name or None: not known

    @property
    def reach(self) -> tuple[int, ...]:
        """Elements from the first to the last that a window covers, along each axis."""
        return tuple(d * (k - 1) for d, k in zip(self.dilations, self.kernel, strict=True))

    @property
    def known(self) -> tuple[int, ...]:
        """The sizes that are known: all, where `reason_against` is None."""
        return tuple(size for size in self.sizes if isinstance(size, int))

    @property
    def counts(self) -> tuple[int, ...]:
        """Steps that the input has room for along each axis."""
        return tuple(size // step for size, step in zip(self.known, self.strides, strict=True))


def windows_of(graph: GraphEditor, node: NodeProto, op: str = "Conv") -> Windows | None:
    """The windows of a Conv or ConvTranspose with a constant (or quantised) weight; None for other nodes."""
    if not is_op(node, op):
        return None
    held = graph.sizes(node.input[1])
    if held is None or len(held) < 3:
        return None
    if graph.constant(node.input[1]) is None and not is_quantised(graph, node.input[1]):
        return None
    first, second, *kernel = held
    strides = tuple(attribute(node, "strides", [1] * len(kernel)))
    dilations = tuple(attribute(node, "dilations", [1] * len(kernel)))
    shape = graph.shape(node.input[0])
    sizes = shape[2:] if shape is not None and len(shape) == len(held) else (None,) * len(kernel)
    second *= attribute(node, "group", 1)
    out, channels = (first, second) if op == "Conv" else (second, first)
    return Windows(out, channels, tuple(kernel), strides, dilations, sizes)


def pads_of(node: NodeProto, windows: Windows) -> tuple[int, ...] | None:
    """Padding at the beginning of each spatial axis, then at the end of each; None where sizes decide it."""
    auto, axes = attribute(node, "auto_pad", "NOTSET"), len(windows.kernel)
    if auto == "NOTSET":
        return tuple(attribute(node, "pads", [0] * 2 * axes))
    if auto == "VALID":
        return (0,) * 2 * axes
    totals, longer = [], attribute(node, "output_padding", [0] * axes)
    for size, step, reach, more in zip(windows.sizes, windows.strides, windows.reach, longer, strict=True):
        if node.op_type == "ConvTranspose":  # the result is as large as the steps
            if reach + 1 < step:
                return None
            totals.append(reach + 1 - step + more)
            continue
        if step != 1 and not isinstance(size, int):
            return None
        left = (size - 1) % step if isinstance(size, int) else 0  # elements after the last step
        totals.append(max(reach - left, 0))
    less, more = [total // 2 for total in totals], [total - total // 2 for total in totals]
    return tuple(less + more if auto == "SAME_UPPER" else more + less)


def reason_against(graph: GraphEditor, node: NodeProto, windows: Windows, kept: NodePatterns) -> str | None:
    """The reason why a Conv's strides cannot become an axis of their own; None if they can.

    The caller checks the padding.
    """
    if (reason := kept.reason(node) or layout_obstacle(graph, node.input[1])) is not None:
        return reason
    if (reason := reason_against_product(node, windows)) is not None:
        return reason
    for axis, (size, step) in enumerate(zip(windows.sizes, windows.strides, strict=True), start=2):
        if not isinstance(size, int):
            return (
                f"the size of axis {axis} of {node.input[0]} is not known, and {step} may not divide it: "
                "export the model with a fixed size if it is for one"
            )
        if size < step or size % step:
            return f"steps of {step} leave a remainder of {size} elements along axis {axis}"
    return None


def reason_against_product(node: NodeProto, windows: Windows) -> str | None:
    """The reason why windows are no rows of one product; None if they are."""
    if attribute(node, "group", 1) != 1:
        return "its groups would have to be written one by one"
    if any(step != 1 and size != 1 for step, size in zip(windows.dilations, windows.kernel, strict=True)):
        return "its windows are dilated"
    return None
