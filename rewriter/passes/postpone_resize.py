"""postpone-resize: moves a pointwise Conv before the Resize that enlarges its input."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from onnx import NodeProto

from rewriter.base.text import count
from rewriter.ir.graph import GraphEditor, attribute, display_name, is_op, is_quantised
from rewriter.ir.graph.match import optional_input, produced
from rewriter.ir.graph.ops import RESIZES
from rewriter.ir.graph.weights import Replacement, layout_obstacle
from rewriter.ir.model import Array
from rewriter.ir.plan import NodePatterns
from rewriter.passes.base import Change, Context, Event, Exactness, WeightPass, refused
from rewriter.target.costs import KERNEL_US, PRODUCTS_PER_US, TYPICAL

_ALIGNED = frozenset("align_corners asymmetric half_pixel half_pixel_symmetric pytorch_half_pixel".split())
"""Coordinate modes in which every weight is of an element of the tensor, and a scale of 1 changes nothing."""


@dataclass(frozen=True)
class PostponeResize(WeightPass):
    """Heads of segmentation networks enlarge all levels to one size, join them, and mix their channels.

    A Resize computes the same weighted mean in each channel, a pointwise Conv (1x1) the same sum in each
    pixel. In exact arithmetic their order makes no difference. So each level gets a Conv of its own, with
    its columns of the weight, before it is enlarged, and the results are added. SegFormer's head then needs
    a third of the multiplications, and its FP16 sums are a quarter as deep
    (docs/accuracy.md#convs-after-a-resize). TensorRT does not do this by itself.

    Operands of the Concat that no Resize enlarges stay together in one Conv, which adds the bias. A Resize
    that changes no size is removed. Without such operands, the Conv of the largest level adds the bias: the
    weights of a mean sum to one, so the mean of a bias is the bias. A Conv that reads a Resize without a
    Concat is moved, too.

    A part stays enlarged if the Conv gives more channels than it has: more would have to be enlarged than
    before. So no Resize grows, and there are always fewer multiplications.

    Each part but one is a kernel more, and so is each sum. Where these cost more time than the
    multiplications that are saved, the Conv stays: in the neck of a detector, whose levels are small, they
    cost 10 % of the latency (YOLOv8n of 320 x 320, docs/accuracy.md#convs-after-a-resize).

    Options:
        work: Least work in MFLOP (2 for each multiplication) that is saved for each kernel more, as long as a
            kernel takes by the recorded costs. An unknown batch counts as 1, unknown height and width as 64.
            0 moves every Conv.

    Declines:
        - a Conv whose parts would save less than `work` for each kernel more
        - an enlarged part, or the Concat, with other consumers
        - a Resize of unknown growth: computed scales, unknown shapes, or sizes for a batch without a number
        - a Resize that crops (tf_crop_and_resize) or keeps the aspect ratio
        - weights that are computed
    """

    exactness = Exactness(1e-5, "another order of sums and means: 4.4e-7 measured on a SegFormer")
    work: int = round(KERNEL_US * PRODUCTS_PER_US["Conv"] * 2e-6)
    example_options: ClassVar[Mapping[str, Any]] = {"work": 0}
    example = """
         g (float[1,2,4,4] fine, float[1,2,2,2] coarse) => (float[1,2,4,4] y)
        -<float[2,4,1,1] w = {1.0, 2.0, 3.0, 4.0, 0.1, 0.2, 0.3, 0.4}, float[2] bias = {0.5, 0.25},
        - float[4] scales = {1.0, 1.0, 2.0, 2.0}> {
        -    large = Resize<mode = "linear">(coarse, , scales)
        -    joined = Concat<axis = 1>(large, fine)
        -    y = Conv(joined, w, bias)
        +<float[2,2,1,1] w0 = {1.0, 2.0, 0.1, 0.2}, float[2,2,1,1] w1 = {3.0, 4.0, 0.3, 0.4},
        + float[2] bias = {0.5, 0.25}, float[4] scales = {1.0, 1.0, 2.0, 2.0}> {
        +    small = Conv(coarse, w0)
        +    large = Resize<mode = "linear">(small, , scales)
        +    rest = Conv(fine, w1, bias)
        +    y = Add(large, rest)
         }"""

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        for conv in graph.nodes:
            parts = _parts(graph, conv, context.kept) if _is_pointwise(graph, conv) else ()
            late, stays = any(p.resize for p in parts), next((p.reason for p in parts if p.reason), None)
            if late or stays:
                reason = _reason_against(graph, conv, context.kept) or (None if late else stays)
                reason = reason or _loss(graph, conv, parts, self.work)
                postponing = _Postponing(graph, conv, parts=parts)
                yield refused(conv, "it stays after the Resize", reason) or postponing.write()


@dataclass(frozen=True)
class _Part:
    """The input of the Conv, or one operand of the Concat that it reads."""

    tensor: str  # the input of the part's own Conv
    first: int  # of its channels in the weight
    count: int
    resize: NodeProto | None = None  # the Resize that follows its Conv; None if none does
    growth: float = 1.0  # how many pixels the Resize makes of one
    reason: str | None = None  # why an enlarging Resize stays where it is


def _is_pointwise(graph: GraphEditor, node: NodeProto) -> bool:
    sizes = graph.sizes(node.input[1]) if is_op(node, "Conv") else None
    if sizes is None or len(sizes) < 3 or {*sizes[2:], attribute(node, "group", 1)} != {1}:
        return False
    pads = attribute(node, "auto_pad", "NOTSET") == "NOTSET" and any(attribute(node, "pads", [0]))
    return not pads and all(step == 1 for step in attribute(node, "strides", [1]))


def _parts(graph: GraphEditor, conv: NodeProto, kept: NodePatterns) -> list[_Part]:
    """Returns the parts of a pointwise Conv's input if their channels are known; otherwise none."""
    tensors = [conv.input[0]]
    source = produced(graph, conv.input[0], "Concat")
    if source is not None:
        if attribute(source, "axis") not in {1, 1 - (graph.rank(source.output[0]) or 1)}:
            return []
        tensors = list(source.input)
    parts: list[_Part] = []
    first, (out, *_) = 0, graph.sizes(conv.input[1]) or (0,)
    for tensor in tensors:
        count = graph.size(tensor, 1)
        if not isinstance(count, int):
            reason = f"the number of channels of {tensor} is unknown"
            resized = any(produced(graph, operand, *RESIZES) for operand in tensors)
            return [_Part(tensor, 0, 0, reason=reason)] if resized else []
        parts.append(_part(graph, _Part(tensor, first, count), out, kept))
        first += count
    return parts


def _part(graph: GraphEditor, part: _Part, out: int, kept: NodePatterns) -> _Part:
    """Returns the part with the Resize that writes it, or with the reason why that stays."""
    resize = produced(graph, part.tensor, *RESIZES)
    if resize is None:
        return part
    name, scales, mode = display_name(resize), _scales(graph, resize), _unknown_mean(resize)
    if mode or scales is None:
        return replace(part, reason=f"{name} {mode}" if mode else f"how much {name} enlarges is not known")
    growth, request = math.prod(scales), next(kept.requests(resize), None)
    if min(scales) < 1 or scales[:2] != (1.0, 1.0) or (growth == 1 and request):
        return part
    if growth == 1:
        return replace(part, tensor=resize.input[0])
    if request is not None:
        return replace(part, reason=f"{name} is kept in FP32 by {request}")
    if graph.only_consumer(resize.output[0]) is None:
        return replace(part, reason=f"the result of {name} has other consumers")
    if part.count < out:
        return replace(part, reason=f"{name} would enlarge {out} channels instead of {part.count}")
    if _inputs_for(graph, resize, out) is None:
        return replace(part, reason=f"the sizes of {name} are for an unknown batch")
    return replace(part, tensor=resize.input[0], resize=resize, growth=growth)


def _reason_against(graph: GraphEditor, conv: NodeProto, kept: NodePatterns) -> str | None:
    source = graph.producer(conv.input[0])
    if (reason := kept.reason(conv, *([source] if source is not None else []))) is not None:
        return reason
    if graph.only_consumer(conv.input[0]) is None:
        return f"{conv.input[0]} has other consumers"
    if graph.constant(conv.input[1]) is None and not is_quantised(graph, conv.input[1]):
        return "its weight is computed"
    return layout_obstacle(graph, conv.input[1])


def _loss(graph: GraphEditor, conv: NodeProto, parts: Sequence[_Part], least: int) -> str | None:
    """The reason to stay if the work that is saved takes less time than the kernels that are added."""
    late = [part for part in parts if part.resize]
    more = 2 * (len(late) + (len(late) < len(parts)) - 1)  # Convs, and the Adds of their results
    batch, *sizes = graph.shape(conv.output[0]) or (1, None, TYPICAL, TYPICAL)
    counts = [size if isinstance(size, int) else TYPICAL for size in sizes]
    saved = sum(part.count * (1 - 1 / part.growth) for part in late)
    mflop = 2e-6 * (batch if isinstance(batch, int) else 1) * math.prod(counts) * saved
    if mflop >= least * more:
        return None
    return f"{mflop:.3g} MFLOP less do not pay for {more} kernels more, {least} MFLOP each"


def _unknown_mean(resize: NodeProto) -> str | None:
    """The reason why a Resize or Upsample is no known mean in each channel; None if it is one."""
    mode = attribute(resize, "coordinate_transformation_mode", "half_pixel")
    if mode not in _ALIGNED:
        return f"has coordinates by {mode}"
    stretches = attribute(resize, "keep_aspect_ratio_policy", "stretch") == "stretch"
    return None if stretches else "keeps the aspect ratio"


def _scales(graph: GraphEditor, resize: NodeProto) -> tuple[float, ...] | None:
    """The factor by which each axis grows; None if one is not known, or before opset 11."""
    before, after = graph.shape(resize.input[0]), graph.shape(resize.output[0])
    if before is None:
        return None
    axes = _axes(resize, len(before))
    if optional_input(resize, 3):  # it has sizes, not scales
        pairs = zip(before, after or (None,) * len(before), strict=True)
        grown = [_growth(*pair) if axis in axes else 1.0 for axis, pair in enumerate(pairs)]
        return tuple(grown) if after is not None and all(grown) else None
    scales = graph.constant(optional_input(resize, 2))
    if scales is None or scales.size != len(axes):
        return None
    named = dict(zip(axes, scales.tolist(), strict=True))
    return tuple(float(named.get(axis, 1.0)) for axis in range(len(before)))


def _growth(old: int | str | None, new: int | str | None) -> float:
    """The factor by which an axis grows; 0 if it is not known."""
    if isinstance(old, int) and isinstance(new, int) and old > 0:
        return new / old
    return 1.0 if old is not None and old == new else 0.0


def _inputs_for(graph: GraphEditor, resize: NodeProto, channels: int) -> Sequence[str | Array] | None:
    """The other inputs of the same Resize of a tensor with other channels: names, or a new constant.

    None if it has sizes for a batch that is not known. Its scales must be known (`_scales`).
    """
    after = graph.shape(resize.output[0]) or ()
    axes = _axes(resize, len(after))
    if not optional_input(resize, 3) or 1 not in axes:
        return list(resize.input[1:])
    sizes = [channels if axis == 1 else after[axis] for axis in axes]
    if not all(isinstance(size, int) for size in sizes):
        return None
    return [resize.input[1], resize.input[2], np.asarray(sizes, np.int64)]


def _axes(resize: NodeProto, rank: int) -> list[int]:
    """The axes that the scales or sizes of a Resize belong to, in their order."""
    return [axis % rank for axis in attribute(resize, "axes", range(rank))]


@dataclass(frozen=True, kw_only=True)
class _Postponing(Replacement):
    parts: Sequence[_Part]

    def write(self) -> Change:
        """Replaces the Conv by the sum of the parts; what is not enlarged comes last, with the bias."""
        late = [part for part in self.parts if part.resize]
        rest = [part for part in self.parts if not part.resize]
        largest = min(late, key=lambda part: part.growth)
        bias, terms = optional_input(self.node, 2), list[str]()
        for part in late:
            small = self._convolve([part], bias if part is largest and not rest else "")
            terms.append(self._enlarge(part, small))
        if rest:
            terms.append(self._convolve(rest, bias))
        total, *others = terms
        for term in others:
            total = self.add("Add", [total, term], self.tensor("sum"))
        self.graph.rename(total, self.node.output[0])
        self.graph.remove(self.node, keep=self.node.output)
        share = sum(part.count / part.growth for part in self.parts) / sum(part.count for part in self.parts)
        done = f"moved before {count(len(late), 'Resize')}, with {share:.2f} of the multiplications"
        return Change(display_name(self.node), done)

    def _convolve(self, parts: Sequence[_Part], bias: str) -> str:
        """Adds one Conv of some of the parts."""
        data = parts[0].tensor
        weight, shape = self.graph.value(self.node.input[1]), self.graph.shape(data)
        if len(parts) > 1:
            data = self.add("Concat", [part.tensor for part in parts], self.tensor("joined"), axis=1)
        columns = np.concatenate([weight[:, part.first : part.first + part.count] for part in parts], axis=1)
        name = self.graph.add_constant(f"{self.node.input[1]}/part", columns)
        inputs = [data, name, bias] if bias else [data, name]
        # a Conv that reads the result asks how much the Resize between the two enlarges
        part = self.tensor("part", shape and (shape[0], len(weight), *shape[2:]))
        return self.add("Conv", inputs, part, kernel_shape=columns.shape[2:])

    def _enlarge(self, part: _Part, small: str) -> str:
        resize, out = part.resize, self.tensor("enlarged")
        channels = len(self.graph.value(self.node.input[1]))
        inputs = _inputs_for(self.graph, resize, channels) if resize is not None else None
        assert resize is not None and inputs is not None  # checked by `_part`
        named = [i if isinstance(i, str) else self.graph.add_constant(f"{out}/size", i) for i in inputs]
        node = self.graph.clone_node(resize, [small, *named], [out], name=f"{self.name}/Resize")
        self.graph.insert(node, before=self.node)
        return out
