"""merge-branches: merges Convs of one tensor whose results are added into one Conv."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from rewriter.ir.graph import GraphEditor, attribute, display_name, is_op, is_quantised
from rewriter.ir.graph.match import optional_input, produced
from rewriter.ir.graph.weights import NewWeights, Replacement, layout_obstacle
from rewriter.ir.model import Array
from rewriter.ir.plan import NodePatterns
from rewriter.passes.algorithms.windows import Windows, pads_of, windows_of
from rewriter.passes.base import Change, Context, Event, Exactness, Refusal, WeightPass, refused

APART = "its Convs stay apart"


@dataclass(frozen=True)
class MergeBranches(WeightPass):
    """Parallel Convs help to train a network and can be one for inference; exports often still have them.

    RepVGG (Ding et al., 2021, arXiv:2101.03697) calls the merge re-parameterisation. RT-DETR's encoder has
    twelve such blocks: a 3x3 and a 1x1 Conv of one tensor, added. The smaller window is padded with zeros,
    and weights and biases are added instead of results: fewer multiplications on every target, and one
    rounding instead of three (docs/accuracy.md#parallel-convs).

    Window a holds window b if, along each axis, the first element of b is an element of a (their first
    paddings differ by a multiple of a's dilation) and b ends inside a. Add(Add(a, b), c) becomes one Conv.

    Skipped without a report: sums with an operand that is no Conv of the same tensor, computed weights. So an
    identity beside the Convs (RepVGG's third branch) stays: FP16 holds less of 1 + w than of w.

    Declines:
        - a Conv whose result has other consumers or is a graph output
        - branches with different strides, dilations, groups or channels; windows, if none holds all others
        - results that may differ in size: Add would broadcast one
        - `auto_pad` of a strided Conv whose input sizes are unknown
        - a computed bias
        - weights whose sum their type cannot hold
    """

    exactness = Exactness(1e-5, "ONNX Runtime orders the sums differently: 2.3e-6 measured on an RT-DETR")
    example = """
         g (float[N,1,4,4] x) => (float[N,2,4,4] y)
        -<float[2,1,3,3] w3 = {1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 8, 7, 6, 5, 4, 3, 2, 1},
        - float[2] b3 = {0.5, 0.25}, float[2,1,1,1] w1 = {0.1, 0.2}, float[2] b1 = {1.0, 2.0}> {
        -    wide = Conv<pads = [1, 1, 1, 1]>(x, w3, b3)
        -    narrow = Conv(x, w1, b1)
        -    y = Add(wide, narrow)
        +<float[2,1,3,3] w = {1, 2, 3, 4, 5.1, 6, 7, 8, 9, 9, 8, 7, 6, 5.2, 4, 3, 2, 1},
        + float[2] b = {1.5, 2.25}> {
        +    y = Conv<pads = [1, 1, 1, 1]>(x, w, b)
         }"""

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        weights = NewWeights(graph)
        for node in graph.nodes if "Conv" in graph.operators else ():
            if branches := _branches(graph, node):
                reason = _reason_against(graph, node, branches, context.kept)
                yield refused(node, APART, reason) or _merge(graph, node, branches, weights)


@dataclass(frozen=True)
class _Branch:
    """One of the Convs; `pads`: at the beginning of each axis, then at the end of each, () if unknown."""

    conv: NodeProto
    windows: Windows
    pads: tuple[int, ...]

    @property
    def bias(self) -> str:
        return optional_input(self.conv, 2)


def _branches(graph: GraphEditor, node: NodeProto) -> list[_Branch]:
    """Returns the Convs that a node adds, the largest window first; [] if it adds anything else."""
    if not is_op(node, "Add", "Sum") or not 1 < len(set(node.input)) == len(node.input):
        return []
    convs = [conv for tensor in node.input if (conv := produced(graph, tensor, "Conv")) is not None]
    windows = [(conv, known) for conv in convs if (known := windows_of(graph, conv)) is not None]
    if len(windows) < len(node.input) or len({conv.input[0] for conv in convs}) > 1:
        return []
    branches = [_Branch(conv, window, pads_of(conv, window) or ()) for conv, window in windows]
    return sorted(branches, key=lambda branch: -math.prod(branch.windows.kernel))


def _reason_against(
    graph: GraphEditor, node: NodeProto, branches: list[_Branch], kept: NodePatterns
) -> str | None:
    if (reason := kept.reason(node, *(branch.conv for branch in branches))) is not None:
        return reason
    for branch in branches:
        if reason := _reason_in_branch(graph, branch):
            return f"{display_name(branch.conv)}: {reason}"
    for branch in branches[1:]:
        if reason := _reason_to_differ(graph, branches[0], branch):
            return f"{display_name(branch.conv)} and {display_name(branches[0].conv)} {reason}"
    return None


def _reason_in_branch(graph: GraphEditor, branch: _Branch) -> str | None:
    if graph.only_consumer(branch.conv.output[0]) is None:
        return f"{branch.conv.output[0]} has other consumers"
    if not branch.pads:
        return f"its auto_pad depends on unknown sizes of {branch.conv.input[0]}"
    if branch.bias and graph.constant(branch.bias) is None:
        return f"its bias is {'quantised' if is_quantised(graph, branch.bias) else 'computed'}"
    return layout_obstacle(graph, branch.conv.input[1])


def _reason_to_differ(graph: GraphEditor, large: _Branch, small: _Branch) -> str | None:
    """Returns why the smaller window cannot be a part of the larger one; None if it can."""
    wide, narrow = large.windows, small.windows
    if wide.strides != narrow.strides:
        return "have different strides"
    if attribute(large.conv, "group", 1) != attribute(small.conv, "group", 1):
        return "have different groups"
    if wide.out != narrow.out:
        return "have different numbers of channels"
    steps = zip(wide.dilations, narrow.dilations, narrow.kernel, strict=True)
    if any(count > 1 and mine != others for mine, others, count in steps):
        return "have different dilations"
    if _lead(large, small) is None:
        return "have windows, and neither holds the other"
    return None if _margins(large) == _margins(small) else "may have results of different sizes"


def _lead(large: _Branch, small: _Branch) -> tuple[int, ...] | None:
    """Returns how far into the large window the small one begins, on each axis; None if it does not fit."""
    leads = []
    for axis, (size, step) in enumerate(zip(large.windows.kernel, large.windows.dilations, strict=True)):
        lead, between = divmod(large.pads[axis] - small.pads[axis], step)
        if lead < 0 or between or lead + small.windows.kernel[axis] > size:
            return None
        leads.append(lead)
    return tuple(leads)


def _margins(branch: _Branch) -> list[int]:
    """Returns, for each axis, how far the padding exceeds the reach of the window."""
    half = len(branch.pads) // 2
    ends = zip(branch.pads[:half], branch.pads[half:], branch.windows.reach, strict=True)
    return [first + last - reach for first, last, reach in ends]


@np.errstate(over="ignore")  # where a sum exceeds its type, it is infinite
def _merge(graph: GraphEditor, node: NodeProto, branches: list[_Branch], weights: NewWeights) -> Event:
    large, *others = branches
    conv, windows = large.conv, large.windows
    leads = [_lead(large, branch) or () for branch in branches]  # `_reason_to_differ` has found them
    weight = np.zeros_like(graph.value(conv.input[1]))
    for branch, lead in zip(branches, leads, strict=True):
        spans = zip(lead, branch.windows.kernel, strict=True)
        part = tuple(slice(first, first + size) for first, size in spans)
        weight[:, :, *part] += graph.value(branch.conv.input[1])
    biases = [branch.bias for branch in branches if branch.bias]
    bias = np.sum([graph.value(name) for name in biases], axis=0)
    if not np.isfinite(weight).all() or not np.isfinite(bias).all():
        reason = "the sum of their weights or biases is not finite in their type"
        return Refusal(display_name(node), f"{APART}: {reason}")
    parts = [(branch.conv.input[1], lead) for branch, lead in zip(branches, leads, strict=True)]
    inputs = [conv.input[0], _shared(weights, parts, weight)]
    if biases:
        inputs.append(_shared(weights, [(name, ()) for name in biases], bias))
    shape = {"kernel_shape": windows.kernel, "strides": windows.strides, "dilations": windows.dilations}
    shape |= {"pads": large.pads, "group": attribute(conv, "group", 1)}
    Replacement(graph, node).finish("Conv", inputs, f"{display_name(conv)}/merged", **shape)
    window = "x".join(map(str, windows.kernel))
    rest = ", ".join(display_name(branch.conv) for branch in others)
    return Change(display_name(conv), f"one Conv of {conv.input[0]} with {rest}: windows of {window}")


def _shared(weights: NewWeights, parts: Sequence[tuple[str, object]], value: Array) -> str:
    """Returns the name of a constant that is the sum of `parts`; Convs with the same parts share it."""
    first = parts[0][0]
    return first if len(parts) == 1 else weights.made(tuple(parts), f"{first}/merged", lambda: value)
