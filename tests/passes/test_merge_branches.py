"""merge-branches: which Convs become one, results that stay, RT-DETR in `fix`, and the presets."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from branched import SAME, SIX, WIDE, merged, model
from graphs import keeps_results, ops, run
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from paths import MODELS

from rewriter.graph import attribute
from rewriter.jobs.fix import api
from rewriter.model import Model, load
from rewriter.passes.merge_branches import MergeBranches
from rewriter.pipeline.presets import PRESETS

STRIDED = "Conv<strides = [2, 2], pads = [1, 1, 1, 1]>"
FAR = "Conv<dilations = [2, 3], pads = [2, 3, 2, 3]>"
MERGED = [
    pytest.param(f"p = {WIDE}(x, w3, a) q = Conv(x, w1, b) y = Add(p, q)", id="RepVGG"),
    pytest.param(f"q = Conv(x, w1, b) p = {WIDE}(x, w3, a) y = Add(q, p)", id="the small one first"),
    pytest.param(f"p = {WIDE}(x, w3) q = Conv(x, w1, b) y = Add(p, q)", id="a bias on the small one"),
    pytest.param(f"p = {WIDE}(x, w3, a) q = Conv(x, w1) y = Add(p, q)", id="a bias on the large one"),
    pytest.param(f"p = {WIDE}(x, w3) q = Conv(x, w1) y = Add(p, q)", id="no bias"),
    pytest.param(f"p = {WIDE}(x, w3, a) q = {WIDE}(x, v3, b) y = Add(p, q)", id="windows of one size"),
    pytest.param(f"p = {WIDE}(x, w3, a) q = {WIDE}(x, w3, a) y = Add(p, q)", id="one weight, two readers"),
    pytest.param("p = Conv(x, v1, a) q = Conv(x, w1, b) y = Add(p, q)", id="pointwise"),
    pytest.param(f"p = {STRIDED}(x, w3, a) q = Conv<strides = [2, 2]>(x, w1) y = Add(p, q)", id="strides"),
    pytest.param(f"p = {FAR}(x, w3, a) q = Conv(x, w1) y = Add(p, q)", id="dilated"),
    pytest.param(
        f"p = {FAR}(x, w3) q = Conv<dilations = [2, 5], pads = [2, 0, 2, 0]>(x, w31) y = Add(p, q)",
        id="a dilation that does not matter",
    ),
    pytest.param(
        "p = Conv<pads = [2, 0, 0, 2]>(x, w3, a) q = Conv(x, w1) y = Add(p, q)", id="at the window's corner"
    ),
    pytest.param(
        "p = Conv<pads = [1, 1, 1, 1]>(x, w3) q = Conv<pads = [0, 1, 1, 0]>(x, w2) y = Add(p, q)",
        id="asymmetric",
    ),
    pytest.param(
        "p = Conv<pads = [2, 2, 2, 2]>(x, w5) q = Conv<pads = [0, 2, 2, 0]>(x, w3) y = Add(p, q)",
        id="a window beside the middle",
    ),
    pytest.param(
        "p = Conv<strides = [2, 2], pads = [1, 1, 0, 1]>(x, w3) q = Conv<strides = [2, 2]>(x, w1)"
        " y = Add(p, q)",
        id="less padding at the end that takes no place",
    ),
    pytest.param(f"p = {WIDE}(x, w3) q = Conv<pads = [0, 1, 0, 1]>(x, w13) y = Add(p, q)", id="a row"),
    pytest.param(
        f"p = {WIDE}(x, w3, a) q = Conv<pads = [0, 1, 0, 1]>(x, w13, b) r = Conv<pads = [1, 0, 1, 0]>(x, w31)"
        " s = Add(p, q) y = Add(r, s)",
        id="three branches",
    ),
    pytest.param(
        f"p = {WIDE}(x, w3, a) q = {WIDE}(x, v3, b) r = Conv(x, w1, c) s = Conv(x, v1) t = Add(r, s)"
        " u = Add(p, q) y = Add(t, u)",
        id="four branches, in pairs",
    ),
    pytest.param(f"p = {WIDE}(x, w3, a) q = Conv(x, w1, b) y = Sum(p, q)", id="Sum of two"),
    pytest.param(
        f"q = Conv(x, w1, b) p = {WIDE}(x, w3, a) r = Conv<pads = [0, 1, 0, 1]>(x, w13, c) y = Sum(q, p, r)",
        id="Sum of three",
    ),
]  # fmt: skip


@pytest.mark.parametrize("opset", [8, 13, 17, 22])
@pytest.mark.parametrize("body", MERGED)
def test_merged(body: str, opset: int) -> None:
    before = model(body, opset=opset)
    after, report = merged(before)
    assert ops(after) == ["Conv"]
    assert not report.refusals
    keeps_results(before, after, MergeBranches())


OTHER_AXES = [
    pytest.param(
        "p = Conv<group = 6, pads = [1, 1, 1, 1]>(x, d3) q = Conv<group = 6>(x, d1) y = Add(p, q)",
        SIX,
        "float[N,C,P,Q] y",
        id="depthwise",
    ),
    pytest.param(
        "p = Conv<group = 2>(x, g1) q = Conv<group = 2>(x, six) y = Add(p, q)",
        SIX,
        "float[N,C,P,Q] y",
        id="two groups",
    ),
    pytest.param(
        "p = Conv<pads = [1, 1]>(x, l3, a) q = Conv(x, l1) y = Add(p, q)",
        "float[2,3,6] x",
        "float[N,C,P] y",
        id="one axis",
    ),
    pytest.param(
        "p = Conv<pads = [1, 1, 1, 1, 1, 1]>(x, c3) q = Conv(x, c1, b) y = Add(p, q)",
        "float[2,3,4,5,6] x",
        "float[N,C,P,Q,R] y",
        id="three axes",
    ),
]


@pytest.mark.parametrize(("body", "x", "outputs"), OTHER_AXES)
def test_groups_and_other_numbers_of_axes(body: str, x: str, outputs: str) -> None:
    before = model(body, x, outputs)
    after, report = merged(before)
    assert ops(after) == ["Conv"]
    assert not report.refusals
    keeps_results(before, after, MergeBranches())


AUTO = [
    pytest.param("UPPER", 1, "w3", [1, 1, 1, 1], id="stride 1"),
    pytest.param("UPPER", 1, "w2", [0, 0, 1, 1], id="an even window, the odd element at the end"),
    pytest.param("LOWER", 1, "w2", [1, 1, 0, 0], id="an even window, the odd element at the beginning"),
    pytest.param("UPPER", 2, "w3", [0, 1, 1, 1], id="stride 2"),
    pytest.param("LOWER", 2, "w3", [1, 1, 0, 1], id="stride 2, the odd element at the beginning"),
    pytest.param("UPPER", 3, "w3", [0, 1, 0, 1], id="stride 3"),
]


@pytest.mark.parametrize(("auto", "step", "weight", "pads"), AUTO)
def test_auto_pad_is_resolved(auto: str, step: int, weight: str, pads: list[int]) -> None:
    """Of 6 x 7 elements."""
    same = SAME.format(auto, step, step)
    before = model(f"p = {same}(x, {weight}, a) q = {same}(x, w1, b) y = Add(p, q)")
    after, report = merged(before)
    assert ops(after) == ["Conv"], report.refusals
    assert attribute(after.proto.graph.node[0], "pads") == pads
    keeps_results(before, after, MergeBranches())


def test_auto_pad_valid_is_none() -> None:
    before = model('p = Conv<auto_pad = "VALID">(x, w3) q = Conv<auto_pad = "VALID">(x, v3, b) y = Add(p, q)')
    after, _ = merged(before)
    assert (ops(after), attribute(after.proto.graph.node[0], "pads")) == (["Conv"], [0, 0, 0, 0])
    keeps_results(before, after, MergeBranches())


def test_sizes_need_not_be_known() -> None:
    before = model(f"p = {WIDE}(x, w3, a) q = Conv(x, w1, b) y = Add(p, q)", "float[N,3,H,W] x")
    after, _ = merged(before)
    assert ops(after) == ["Conv"]
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 3, 9, 5)).astype(np.float32)}
    np.testing.assert_allclose(run(after, feeds)[0], run(before, feeds)[0], rtol=1e-4, atol=1e-5)


def test_names_and_weights() -> None:
    before = model(f"[wide] p = {WIDE}(x, w3, a) [narrow] q = Conv(x, w1, b) y = Add(p, q)")
    given = {t.name: before.array(t) for t in before.proto.graph.initializer}
    after, report = merged(before)
    (conv,) = after.proto.graph.node
    assert (conv.name, list(conv.output)) == ("wide/merged", ["y"])
    made = {t.name: after.array(t) for t in after.proto.graph.initializer}
    assert made.keys() == {"w3/merged", "a/merged"}
    wanted = given["w3"].copy()
    wanted[:, :, 1, 1] += given["w1"][:, :, 0, 0]
    np.testing.assert_array_equal(made["w3/merged"], wanted)
    np.testing.assert_array_equal(made["a/merged"], given["a"] + given["b"])
    assert report.changes[0].what == "one Conv of x with narrow: windows of 3x3"


@pytest.mark.parametrize(("large", "small"), [("a", ""), ("", "a")])
def test_a_single_bias_is_kept(large: str, small: str) -> None:
    after, _ = merged(model(f"p = {WIDE}(x, w3, {large}) q = Conv(x, w1, {small}) y = Add(p, q)"))
    assert list(after.proto.graph.node[0].input) == ["x", "w3/merged", "a"]


def test_three_branches_have_one_name_and_one_weight() -> None:
    before = model(
        f"[wide] p = {WIDE}(x, w3, a) q = {WIDE}(x, v3, b) r = Conv(x, w1) s = Add(p, q) y = Add(s, r)"
    )
    after, report = merged(before)
    assert [node.name for node in after.proto.graph.node] == ["wide/merged"]
    assert len(after.proto.graph.initializer) == 2
    assert len(report.changes) == 2


def test_shared_weights_stay_and_their_sums_are_shared() -> None:
    block = "p{0} = Conv<pads = [1, 1, 1, 1]>({1}, w3, a) q{0} = Conv({1}, w1, b) y{0} = Add(p{0}, q{0})"
    body = f"{block.format(1, 'x')} r = Relu(x) {block.format(2, 'r')} n = Neg(w1)"
    before = model(body, outputs="float[N,C,P,Q] y1, float[N,C,P,Q] y2, float[4,3,1,1] n")
    after, report = merged(before)
    assert len(report.changes) == 2
    assert {t.name for t in after.proto.graph.initializer} == {"w3/merged", "a/merged", "w1"}
    keeps_results(before, after, MergeBranches())


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
    nodes, held, terms = [], [], []
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
        held += [numpy_helper.from_array(v.astype(np.float32), n) for n, v in values.items()]
        layout: dict[str, Any] = {
            "strides": strides,
            "dilations": dilations,
            "pads": begin + end,
            "group": group,
        }
        nodes.append(helper.make_node("Conv", ["x", *values], [f"c{index}"], **layout))
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
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [draw(st.integers(1, 2)), read, *sizes])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    made = helper.make_graph(nodes, "g", [x], [y], held)
    opset = draw(st.sampled_from([11, 13, 17, 18, 21, 22]))
    source = helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return load(onnx.shape_inference.infer_shapes(source)), inside


@settings(max_examples=300, deadline=None)
@given(blocks())
def test_any_block_keeps_its_results(made: tuple[Model, bool]) -> None:
    before, inside = made
    after, report = merged(before)
    assert report.changes or not inside, report.refusals
    if not report.changes:
        assert after is before
        assert report.refusals
        return
    assert ops(after) == ["Conv"]
    keeps_results(before, after, MergeBranches())


BLOCKS = 12
"""Of RT-DETR's encoder: three in each of two blocks down and two up."""


def test_rt_detr_has_its_blocks_merged() -> None:
    before = load(MODELS / "rtdetr.onnx")
    after, report = merged(before)
    assert (len(report.changes), report.refusals) == (BLOCKS, ())
    assert ops(before).count("Conv") - ops(after).count("Conv") == BLOCKS
    assert ops(before).count("Add") - ops(after).count("Add") == BLOCKS
    feeds = dict(np.load(MODELS / "rtdetr.npz"))
    for wanted, found in zip(run(before, feeds), run(after, feeds), strict=True):
        error = np.linalg.norm(found.astype(np.float64) - wanted)
        assert error <= MergeBranches.exactness.tolerance * np.linalg.norm(wanted)


def test_fix_merges_convs_that_no_option_keeps() -> None:
    name = "/inner/model/encoder/fpn_blocks.0/bottlenecks/bottlenecks.0/conv2/conv/Conv"
    result = api.fix(MODELS / "rtdetr.onnx", inputs=MODELS / "rtdetr.npz", verify=False, keep_fp32=[name])
    (report,) = (step for step in result.passes if step.name == "merge-branches")
    assert (len(report.changes), len(report.refusals)) == (BLOCKS - 1, 1)
    nodes = {node.name: node.op_type for node in result.proto.graph.node}
    assert nodes[name] == "Conv"
    assert sum(made.endswith("/merged") for made in nodes) >= BLOCKS - 1


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_merges_once_batch_norms_are_folded(preset: str) -> None:
    names = PRESETS[preset].pipeline.split(",")
    assert names.index("simplify") < names.index("merge-branches")
