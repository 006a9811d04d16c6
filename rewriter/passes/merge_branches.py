"""merge-branches: Convs of one tensor whose results are added become one Conv."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from rewriter.base import Change, Context, Event, Exactness, GraphPass, Kept, Refusal
from rewriter.graph import GraphEditor, attribute, is_quantised, label, made_by, is_op
from rewriter.model import Array
from rewriter.patterns.windows import Windows, pads_of, reason_in_weight, windows_of


@dataclass(frozen=True)
class MergeBranches(GraphPass):
    """Parallel Convs, which help to train a network, can be one for inference; exports often have them still.

    RepVGG (Ding et al., 2021, arXiv:2101.03697) calls it re-parameterisation. RT-DETR's encoder has twelve
    such blocks: a 3x3 and a 1x1 Conv of one tensor, added. A Conv is linear in its weight: with zeros round
    it, the smaller window is as large as the other, and the weights and biases are added in place of the
    results. Measured on one H200 with TensorRT-RTX 1.6.1, RT-DETR R101 by the preset `trt-fp16`: 2100 us and
    an error of 5.31e-3 apart, 2027 us and 4.71e-3 merged. One result is rounded and not three.

    The merged Conv has the window of the largest branch, so there are fewer multiplications whatever the
    target is. Window a holds window b if, along each axis, b's first element is one of a's: the paddings at
    the beginning differ by a multiple of a's dilation; and b ends in a. Strides and groups are the same, and
    dilations where b's window has more than one element. `auto_pad` is resolved.

    Add and Sum are taken, and Adds in a row from the first: Add(Add(a, b), c) becomes one Conv. It stands
    behind `simplify`, which makes BatchNormalizations a part of their Convs. The new weights are held in
    memory until they are lowered, those of external data, too.

    Left alone without a word: sums with a term that is no Conv of the same tensor, computed weights. So an
    identity beside the Convs stays (RepVGG has some): 1 + w in FP16 keeps less of w than w alone, and that
    was not measured.

    Declines:
        - a Conv whose result others read as well, or that is an output of the graph
        - branches with other strides, dilations, groups or channels, and windows of which none holds all
        - results whose sizes may differ (shapes do not tell): Add would broadcast one
        - `auto_pad` of a strided Conv that reads sizes that are not known
        - an Add or a Conv that --keep-fp32, --keep-fp32-op or an edited plan names
        - weights that are quantised, or that belong to a graph around this one; a bias that is computed
        - weights whose sum their type cannot hold
    """

    name = "merge-branches"
    exactness = Exactness(
        1e-5, "the same products are summed otherwise: 2.3e-6 measured on an RT-DETR's logits"
    )
    before = """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[N,1,4,4] x) => (float[N,2,4,4] y)
        <float[2,1,3,3] w3 = {1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 8, 7, 6, 5, 4, 3, 2, 1},
         float[2] b3 = {0.5, 0.25}, float[2,1,1,1] w1 = {0.1, 0.2}, float[2] b1 = {1.0, 2.0}> {
            wide = Conv<pads = [1, 1, 1, 1]>(x, w3, b3)
            narrow = Conv(x, w1, b1)
            y = Add(wide, narrow)
        }"""
    after = """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[N,1,4,4] x) => (float[N,2,4,4] y)
        <float[2,1,3,3] w = {1, 2, 3, 4, 5.1, 6, 7, 8, 9, 9, 8, 7, 6, 5.2, 4, 3, 2, 1},
         float[2] b = {1.5, 2.25}> {
            y = Conv<pads = [1, 1, 1, 1]>(x, w, b)
        }"""

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        names: dict[object, str] = {}
        for node in graph.nodes:
            found = _branches(graph, node)
            if found:
                reason = _reason_against(graph, node, found, context.kept)
                yield _refused(node, reason) if reason else _merge(graph, node, found, names)


def _refused(node: NodeProto, reason: str) -> Refusal:
    return Refusal(label(node), f"its Convs stay apart: {reason}")


@dataclass(frozen=True)
class _Branch:
    """One of the Convs.

    Attributes:
        pads: At the beginning of each axis, then at the end of each; () if they are not known.
    """

    conv: NodeProto
    windows: Windows
    pads: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements of its window."""
        return math.prod(self.windows.kernel)

    @property
    def bias(self) -> str:
        return self.conv.input[2] if len(self.conv.input) > 2 else ""


def _branches(graph: GraphEditor, node: NodeProto) -> list[_Branch]:
    """The Convs that a node adds, the largest window first; [] if it adds others, or they read others."""
    if not is_op(node, "Add", "Sum"):
        return []
    if not 1 < len(set(node.input)) == len(node.input):
        return []
    convs = [conv for conv in map(graph.producer, node.input) if conv is not None and conv.op_type == "Conv"]
    if len(convs) < len(node.input) or len({tuple(conv.input[:1]) for conv in convs}) > 1:
        return []
    found = []
    for conv in convs:
        windows = windows_of(graph, conv)
        if windows is None:
            return []
        found.append(_Branch(conv, windows, pads_of(conv, windows) or ()))
    return sorted(found, key=lambda branch: -branch.size)


def _reason_against(graph: GraphEditor, node: NodeProto, found: list[_Branch], kept: Kept) -> str:
    for named in (node, *(branch.conv for branch in found)):
        option = next(kept.options(named), None)
        if option is not None:
            return f"{label(named)} is kept in FP32 by {option}"
    for branch in found:
        reason = _reason_in_branch(graph, branch)
        if reason:
            return f"{label(branch.conv)}: {reason}"
    for branch in found[1:]:
        reason = _reason_to_differ(graph, found[0], branch)
        if reason:
            return f"{label(branch.conv)} and {label(found[0].conv)} {reason}"
    return ""


def _reason_in_branch(graph: GraphEditor, branch: _Branch) -> str:
    if graph.only_consumer(branch.conv.output[0]) is None:
        return f"others read {branch.conv.output[0]}, too"
    if not branch.pads:
        return f"its auto_pad goes by sizes of {branch.conv.input[0]} that are not known"
    if branch.bias and graph.constant(branch.bias) is None:
        return f"its bias is {'quantised' if is_quantised(graph, branch.bias) else 'computed'}"
    return reason_in_weight(graph, branch.conv.input[1]) or ""


def _reason_to_differ(graph: GraphEditor, large: _Branch, small: _Branch) -> str:
    """Why the smaller window cannot be a part of the larger one."""
    one, other = large.windows, small.windows
    for what, values in (
        ("strides", (one.strides, other.strides)),
        ("groups", tuple(attribute(branch.conv, "group", 1) for branch in (large, small))),
        ("numbers of channels", (one.out, other.out)),
    ):
        if values[0] != values[1]:
            return f"have other {what}"
    steps = zip(one.dilations, other.dilations, other.kernel, strict=True)
    if any(count > 1 and mine != others for mine, others, count in steps):
        return "have other dilations"
    if _lead(large, small) is None:
        return "have windows of which none holds the other"
    return "" if _same_sizes(graph, large, small) else "may have results of other sizes"


def _lead(large: _Branch, small: _Branch) -> tuple[int, ...] | None:
    """Elements of the large window before the small one, along each axis; None if it does not hold that."""
    found = []
    for axis, (size, step) in enumerate(zip(large.windows.kernel, large.windows.dilations, strict=True)):
        lead, between = divmod(large.pads[axis] - small.pads[axis], step)
        if lead < 0 or between or lead + small.windows.kernel[axis] > size:
            return None
        found.append(lead)
    return tuple(found)


def _same_sizes(graph: GraphEditor, large: _Branch, small: _Branch) -> bool:
    """Whether both results have the same places: as much is padded as windows reach, or shapes tell."""
    shapes = [graph.shape(branch.conv.output[0]) or () for branch in (large, small)]
    for axis, margins in enumerate(zip(_margins(large), _margins(small), strict=True), start=2):
        sizes = [shape[axis] if len(shape) > axis else None for shape in shapes]
        known = isinstance(sizes[0], int) and sizes[0] == sizes[1]
        if margins[0] != margins[1] and not known:
            return False
    return True


def _margins(branch: _Branch) -> list[int]:
    """By how much more is padded than the window reaches, along each axis."""
    half = len(branch.pads) // 2
    totals = [b + e for b, e in zip(branch.pads[:half], branch.pads[half:], strict=True)]
    return [total - reach for total, reach in zip(totals, branch.windows.reach, strict=True)]


def _merge(graph: GraphEditor, node: NodeProto, found: list[_Branch], names: dict[object, str]) -> Event:
    """Put one Conv in the place of the sum; `names`: of the new constants, by what they are sums of."""
    weight, bias = _weight(graph, found), _bias(graph, found)
    if not np.isfinite(weight).all() or (bias is not None and not np.isfinite(bias).all()):
        return _refused(node, "the sum of their weights or biases is not finite in their type")
    large, *others = found
    conv = large.conv
    inputs = [
        conv.input[0],
        _shared(graph, names, [(b.conv.input[1], _lead(large, b)) for b in found], weight),
    ]
    if bias is not None:
        inputs.append(_shared(graph, names, [(b.bias, ()) for b in found if b.bias], bias))
    graph.substitute(node.output[0], _conv(graph, large, inputs, node.output[0]))
    window = "x".join(map(str, large.windows.kernel))
    rest = ", ".join(label(branch.conv) for branch in others)
    return Change(label(conv), f"one Conv of {conv.input[0]} with {rest}: windows of {window}")


def _conv(graph: GraphEditor, large: _Branch, inputs: list[str], out: str) -> NodeProto:
    """A Conv with the windows of a branch, and with its name if that was made here: it goes."""
    made = graph.make(
        "Conv",
        inputs,
        [out],
        name=f"{label(large.conv)}/merged",
        kernel_shape=large.windows.kernel,
        strides=large.windows.strides,
        dilations=large.windows.dilations,
        pads=large.pads,
        group=attribute(large.conv, "group", 1),
    )
    if made_by(large.conv, (MergeBranches.name,)):
        made.name = large.conv.name
    return made


def _weight(graph: GraphEditor, found: list[_Branch]) -> Array:
    """The sum of the weights [channels, read, largest window]; infinite where their type cannot hold it."""
    large = found[0]
    total = np.array(graph.constant(large.conv.input[1]))
    for branch in found[1:]:
        lead, kernel = _lead(large, branch), branch.windows.kernel
        assert lead is not None  # `_reason_to_differ` asked
        place = tuple(slice(first, first + size) for first, size in zip(lead, kernel, strict=True))
        with np.errstate(over="ignore"):
            total[:, :, *place] += graph.constant(branch.conv.input[1])
    return total


def _bias(graph: GraphEditor, found: list[_Branch]) -> Array | None:
    """The sum of the biases [channels]; None if no branch has one."""
    values = [graph.constant(branch.bias) for branch in found if branch.bias]
    with np.errstate(over="ignore"):
        return np.sum(np.stack([value for value in values if value is not None]), axis=0) if values else None


def _shared(
    graph: GraphEditor, names: dict[object, str], parts: list[tuple[str, object]], value: Array
) -> str:
    """Name of a constant that is the sum of `parts`: Convs that share them share it, too."""
    if len(parts) == 1:
        return parts[0][0]
    key = tuple(parts)
    if key not in names:
        names[key] = graph.add_constant(f"{parts[0][0]}/merged", value)
    return names[key]
