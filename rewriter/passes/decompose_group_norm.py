"""decompose-group-norm: a GroupNorm becomes LayerNormalization over the channels and pixels of its groups."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, TensorProto, helper

from rewriter.ir.graph import GraphEditor, attribute, display_name, is_op
from rewriter.ir.graph.match import walk_down
from rewriter.ir.graph.ops import RESHAPES
from rewriter.ir.graph.weights import NewWeights, Replacement
from rewriter.passes.base import Change, Context, Event, Exactness, GraphPass, Refusal, Requires

ACTIVATIONS = ("Relu", "Sigmoid", "Swish")
LARGE = 2**20  # elements from which the own kernel is faster
WIDTH = 64  # TensorRT-RTX's own kernel was right wherever the channels are a multiple of this

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class DecomposeGroupNorm(GraphPass):
    """TensorRT-RTX's own kernel for GroupNorm is slow, wrong for 80 to 240 channels, and may not load.

    Exporters write the operator (from opset 21 on), or InstanceNormalization of scale 1 and bias 0 between
    Reshapes: its rows are groups. LayerNormalization over the channels and pixels of each group is the same.
    In FP16 on one H200 (1.6.1) an EfficientNet-B0 takes 825 instead of 1194 us and NaN, and the UNet of a
    latent diffusion model 958 (1120).

    The own kernel takes 20 us for any size, this one up to 120. So a norm of 2^20 elements, or of an image of
    unknown size, stays where an activation follows and channels are a multiple of 64: all such norms loaded
    and were right.

    Declines:
        - a larger norm before Relu or SiLU, of a multiple of 64 channels
        - rows, and the operator, of unknown size
    """

    requires = Requires(opset=17)
    exactness = Exactness(1e-5, "sums of FP32 in another order")
    example = """
         g (float[1,4,2,2] x) => (float[1,4,2,2] y)
        -<int64[3] groups = {0, 2, -1}, int64[4] whole = {1, 4, 2, 2},
        - float[2] one = {1, 1}, float[2] zero = {0, 0}> {
        -    rows = Reshape(x, groups)
        -    norm = InstanceNormalization<epsilon = 0.000001>(rows, one, zero)
        -    y = Reshape(norm, whole)
        +<int64[5] places = {0, 2, 2, 2, 2}, int64[3] groups = {0, 2, -1}, int64[4] whole = {1, 4, 2, 2},
        + float[2,2,2] ones = {1, 1, 1, 1, 1, 1, 1, 1}> {
        +    view = Reshape(x, places)
        +    norm = LayerNormalization<axis = 2, epsilon = 0.000001>(view, ones)
        +    rows = Reshape(norm, groups)
        +    y = Reshape(rows, whole)
         }"""

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        weights = NewWeights(graph)
        for node in graph.nodes:
            if (found := _found(graph, node)) is None:
                continue
            data, sizes = found
            elements = math.prod(graph.sizes(data) or sizes)  # below 0: not known
            own = len(sizes) > 2 and sizes[0] * sizes[1] % WIDTH == 0 and not 0 < elements < LARGE
            if len(sizes) < 2:
                yield Refusal(display_name(node), "the number of elements of a group is not known")
            elif own and _activated(graph, node.output[0]):
                reason = "TensorRT's kernel suits a norm that may be large, with an activation"
                yield Refusal(display_name(node), reason)
            else:
                _write(graph, node, data, sizes, weights)
                yield Change(display_name(node), "a GroupNorm became LayerNormalization over its groups")


def _found(graph: GraphEditor, node: NodeProto) -> tuple[str, Sizes] | None:
    """The input of a GroupNorm with its sizes after the batch: [groups, their channels, height, width].

    Rows that are not a view of an image are [groups, length]; an image of unknown height or width is [groups,
    their channels, -1]; () means that other sizes are unknown. None: it is another node, or its scale is
    computed or has one element per group, as in GroupNormalization before opset 21.
    """
    of_groups = is_op(node, "GroupNormalization") and graph.model.opset >= 21
    if not of_groups and not is_op(node, "InstanceNormalization"):
        return None
    data, known = node.input[0], _inner(graph, node.input[0])
    scale, bias = map(graph.constant, node.input[1:3])
    if scale is None or bias is None or len(known) < 2:
        return None
    if of_groups:
        groups = attribute(node, "num_groups", 1)
        return data, (groups, known[0] // groups, *known[1:]) if min(known) > 0 else ()
    if (scale != 1).any() or (bias != 0).any() or len(known) != 2:
        return None
    view = graph.producer(data)
    if view is not None and is_op(view, "Reshape") and known[0] > 0:
        image, target = view.input[0], graph.constant(view.input[1])
        batch, (channels, *sizes) = (graph.shape(image) or ())[:1], _inner(graph, image) or (0,)
        if len(sizes) > 1 and channels > 0 and channels % known[0] == 0:
            if min(sizes) > 0 and channels * math.prod(sizes) == math.prod(known):
                return image, (known[0], channels // known[0], *sizes)
            if min(sizes) < 0 and channels > known[0] and target is not None and target[0] in (0, *batch):
                return image, (known[0], channels // known[0], -1)
    return data, known if min(known) > 0 else ()


def _inner(graph: GraphEditor, tensor: str) -> Sizes:
    """Sizes after the batch; -1 for those that are not known."""
    return tuple(size if isinstance(size, int) else -1 for size in (graph.shape(tensor) or ())[1:])


def _activated(graph: GraphEditor, tensor: str) -> bool:
    """True if Relu or SiLU reads a tensor, through views, and through a scale and a bias for each channel."""

    def leads_on(node: NodeProto) -> bool:
        affine = is_op(node, "Mul", "Add") and any(graph.constant(name) is not None for name in node.input)
        return affine or is_op(node, *RESHAPES)

    _, end = walk_down(graph, tensor, leads_on)
    return any(is_op(reader, *ACTIVATIONS) for reader in graph.consumers(end))


def _write(graph: GraphEditor, node: NodeProto, data: str, sizes: Sizes, weights: NewWeights) -> None:
    new = Replacement(graph, node)
    dtype = helper.tensor_dtype_to_np_dtype(graph.dtype(data) or TensorProto.FLOAT)
    # ONNX Runtime's FP16 kernel is wrong for a scale of one element, which ONNX allows
    shape = [max(size, 1) for size in sizes[1:]]
    ones = weights.made((sizes, dtype), f"{node.output[0]}/ones", lambda: np.ones(shape, dtype))
    fields = {"axis": 2, "epsilon": attribute(node, "epsilon", 1e-5)}
    if len(sizes) == 2:
        new.finish("LayerNormalization", [data, ones], new.name, **fields)
        return
    view = new.reshape(data, sizes, new.tensor("view"))
    normal = new.add("LayerNormalization", [view, ones], new.tensor("normal"), new.name, **fields)
    if node.op_type == "InstanceNormalization":
        new.finish("Reshape", [normal, graph.add_ints(f"{node.output[0]}/rows", 0, sizes[0], -1)])
        return
    image = new.reshape(normal, (sizes[0] * sizes[1], *sizes[2:]), new.tensor("image"))
    column = (-1, *[1 for _ in sizes[2:]])
    scale, bias = (weights.changed(name, "column", lambda v: v.reshape(column)) for name in node.input[1:3])
    new.finish("Add", [new.add("Mul", [image, scale], new.tensor("scaled")), bias])
