"""merge-branches: which Convs become one, results that stay, RT-DETR in `fix`, and the presets."""

from typing import Any

import numpy as np
from graphs import apply, keeps_results, model_of, ops
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper
from paths import MODELS

from rewriter import api
from rewriter.ir.model import Array, Model
from rewriter.passes.merge_branches import MergeBranches


@st.composite
def blocks(draw: st.DrawFn) -> tuple[Model, bool]:
    """Two to four Convs of one tensor and their sum, and whether the first's window is known to hold all."""
    axes, inside = draw(st.integers(1, 2)), draw(st.integers(0, 3)) > 0
    group = draw(st.integers(1, 3))
    read, out = group * draw(st.integers(1, 3)), group * draw(st.integers(1, 3))
    strides = [draw(st.integers(1, 3)) for _ in range(axes)]
    dilations = [draw(st.integers(1, 3)) for _ in range(axes)]
    kernel = [draw(st.integers(1, 5)) for _ in range(axes)]
    least = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
    pads = [least[a % axes] + draw(st.integers(0, 2)) for a in range(2 * axes)]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    nodes, held, terms = [], dict[str, Array](), []
    for index in range(draw(st.integers(2, 4))):
        size, begin, end = kernel, pads[:axes], pads[axes:]
        if index:  # a part of the window, and of its padding
            first = [draw(st.integers(0, k - 1)) for k in kernel]
            size = [draw(st.integers(1, k - f)) for k, f in zip(kernel, first, strict=True)]
            begin = [p - d * f for p, d, f in zip(begin, dilations, first, strict=True)]
            last = [k - f - s for k, f, s in zip(kernel, first, size, strict=True)]
            end = [p - d * behind for p, d, behind in zip(end, dilations, last, strict=True)]
            shift = 0 if inside else draw(st.integers(-min(begin), min(end)))
            begin, end = [p + shift for p in begin], [p - shift for p in end]  # results keep their size
        values = {f"w{index}": rng.standard_normal((out, read // group, *size))}
        if draw(st.booleans()):
            values[f"b{index}"] = rng.standard_normal(out)
        held |= values
        layout: dict[str, Any] = {"strides": strides, "dilations": dilations, "group": group}
        nodes.append(helper.make_node("Conv", ["x", *values], [f"c{index}"], pads=begin + end, **layout))
        terms.append(f"c{index}")
    order = draw(st.permutations(terms)) if draw(st.booleans()) else terms
    if inside and order == terms and draw(st.booleans()):
        for index, term in enumerate(terms[1:], start=1):
            left = "c0" if index == 1 else f"s{index - 1}"
            nodes.append(helper.make_node("Add", [left, term], [f"s{index}"]))
        nodes[-1].output[0] = "y"
    else:
        nodes.append(helper.make_node("Sum", order, ["y"]))
    sizes = [draw(st.integers(1, 6)) for _ in range(axes)]
    opset = draw(st.sampled_from([11, 13, 17, 18, 21, 22]))
    return model_of(nodes, {"x": [draw(st.integers(1, 2)), read, *sizes]}, "y", held, opset=opset), inside


@given(blocks())
def test_any_block_keeps_its_results(made: tuple[Model, bool]) -> None:
    before, inside = made
    after, report = apply(MergeBranches(), before)
    assert report.changes or not inside, report.refusals
    if not report.changes:
        assert after is before
        assert report.refusals
        return
    assert ops(after) == ["Conv"]
    keeps_results(before, after, MergeBranches())


BLOCKS = 12  # of RT-DETR's encoder: three in each of two blocks down and two up


def test_fix_merges_convs_that_no_option_keeps() -> None:
    name = "/inner/model/encoder/fpn_blocks.0/bottlenecks/bottlenecks.0/conv2/conv/Conv"
    result = api.fix(MODELS / "rtdetr.onnx", inputs=MODELS / "rtdetr.npz", verify=False, keep_fp32=[name])
    (report,) = (step for step in result.passes if step.name == "merge-branches")
    assert (len(report.changes), len(report.refusals)) == (BLOCKS - 1, 1)
    nodes = {node.name: node.op_type for node in result.proto.graph.node}
    assert nodes[name] == "Conv"
    assert sum(made.endswith("/merged") for made in nodes) >= BLOCKS - 1
