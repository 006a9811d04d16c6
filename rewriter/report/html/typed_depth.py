"""The chart of ranges on the pages of `verify` and `locate`: the original's, by the other model's types."""

from __future__ import annotations

from collections.abc import Mapping

from rewriter.data.ranges.depth import Depth, TensorAtDepth
from rewriter.report.html.depth import LARGEST, Nodes, depth_chart
from rewriter.report.html.view import Section

LABELS = {
    "fp16": "FP16",
    "bf16": "BF16",
    "fp32": "FP32",
    "beyond": "FP16, although it exceeds 65504",
    "note": "not in the other model",
}


def typed_depth(depth: Depth, marks: Mapping[str, str]) -> Section:
    """Returns the section; `marks` has a sentence for each tensor that is marked."""
    title = "Ranges along the depth of the network"
    if not depth.tensors:
        return Section("ranges", title, "No ranges were measured: `ranges=True` asks for them.", [])

    def kind(tensor: TensorAtDepth) -> str:
        computed = depth.types.get(tensor.tensor, "note")
        return "beyond" if computed == "fp16" and not tensor.range.absmax <= LARGEST else computed

    def mark(tensor: TensorAtDepth) -> str:
        exceeds = "its values exceed 65504, and the other model computes it in FP16"
        return marks.get(tensor.tensor) or (exceeds if kind(tensor) == "beyond" else "")

    lead = (
        "Every bar is one tensor of the original, from its mean to its largest absolute value on the first "
        "sample, measured in FP32. The strip below shows the type that the other model computes it in."
    )
    nodes = Nodes(kind, LABELS, mark, "wrong, or beyond FP16", "Computes in")
    return Section("ranges", title, lead, [depth_chart(depth.tensors, nodes)])
