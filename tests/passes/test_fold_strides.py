"""fold-strides: Convs of images that read blocks, Convs that stay, and results that stay."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import apply, ops, with_weights
from onnx import TensorProto, helper, numpy_helper
from stems import FOLDED, STEM, same_results, stem_model

from rewriter.base import Context, Kept
from rewriter.graph import attribute
from rewriter.model import load
from rewriter.passes.fold_strides import FoldStrides

CASES = [
    pytest.param(f"{{ y = {STEM}(x, w, b) }}", "float[N,5,4,6] y", [4, 4], [2, 2, 1, 1], id="ResNet's stem"),
    pytest.param(
        "{ y = Conv<strides = [4, 4], pads = [3, 3, 3, 3]>(x, w) }",
        "float[N,5,2,3] y",
        [2, 2],
        [1, 1, 0, 0],
        id="SegFormer's, no bias",
    ),
    pytest.param(
        "{ y = Conv<strides = [2, 2]>(x, w, b) }", "float[N,5,1,3] y", [4, 4], [0, 0, 0, 0], id="no padding"
    ),
    pytest.param(
        "{ y = Conv<strides = [2, 4], pads = [3, 2, 2, 1]>(x, w, b) }",
        "float[N,5,4,3] y",
        [4, 3],
        [2, 1, 1, 1],
        id="axes that differ",
    ),
    pytest.param(
        '{ y = Conv<strides = [2, 2], auto_pad = "SAME_UPPER">(x, w, b) }',
        "float[N,5,4,6] y",
        [4, 4],
        [1, 1, 2, 2],
        id="an odd element at the end",
    ),
    pytest.param(
        '{ y = Conv<strides = [2, 2], auto_pad = "SAME_LOWER">(x, w, b) }',
        "float[N,5,4,6] y",
        [4, 4],
        [2, 2, 1, 1],
        id="an odd element before",
    ),
    pytest.param(
        '{ y = Conv<strides = [2, 2], auto_pad = "VALID">(x, w, b) }',
        "float[N,5,1,3] y",
        [4, 4],
        [0, 0, 0, 0],
        id="auto_pad without padding",
    ),
    pytest.param(
        "{ n = Neg(b) y = Conv<strides = [2, 2], pads = [3, 3, 3, 3], kernel_shape = [7, 7]>(x, w, n) }",
        "float[N,5,4,6] y",
        [4, 4],
        [2, 2, 1, 1],
        id="a computed bias",
    ),
]


@pytest.mark.parametrize("opset", [11, 17, 22])
@pytest.mark.parametrize(("body", "outputs", "kernel", "pads"), CASES)
def test_folded(body: str, outputs: str, kernel: list[int], pads: list[int], opset: int) -> None:
    before = stem_model(body, outputs, opset=opset)
    after, report = apply(FoldStrides(), before)
    assert [op for op in ops(after) if op != "Neg"] == FOLDED
    conv = after.proto.graph.node[-1]
    assert (attribute(conv, "kernel_shape"), attribute(conv, "pads")) == (kernel, pads)
    assert attribute(conv, "strides") is None
    assert len(report.changes) == 1
    assert not report.refusals
    same_results(before, after)


def test_names_and_words() -> None:
    before = stem_model(f"{{ y = {STEM}(x, w) }}")
    before.proto.graph.node[0].name = "/stem/Conv"
    after, report = apply(FoldStrides(), before)
    names = [node.name for node in after.proto.graph.node]
    assert all(name.startswith("/stem/Conv/folded") for name in names)
    assert names[-1] == "/stem/Conv/folded"
    assert (report.changes[0].node, report.changes[0].what) == (
        "/stem/Conv",
        "stride 1 and a window of 4x4 in 12 channels",
    )


def test_weights_are_shared_by_convs_that_pad_alike() -> None:
    before = stem_model(
        f"""{{
            y = {STEM}(x, w, b)
            n = Neg(x)
            z = {STEM}(n, w)
            v = Conv<strides = [2, 2], pads = [2, 2, 3, 3]>(n, w)
        }}""",
        "float[N,5,4,6] y, float[N,5,4,6] z, float[N,5,4,6] v",
    )
    after, report = apply(FoldStrides(), before)
    assert len(report.changes) == 3
    read = [node.input[1] for node in after.proto.graph.node if node.op_type == "Conv"]
    assert read[0] == read[1] != read[2]
    assert "w" not in {t.name for t in after.proto.graph.initializer}
    same_results(before, after)


DECLINED = [
    pytest.param(f"{{ y = {STEM}(x, w) }}", "float[N,3,H,12] x", "axis 2 of x is not known", id="any height"),
    pytest.param(f"{{ y = {STEM}(x, w) }}", "float[N,3,8,W] x", "with a fixed size", id="any width"),
    pytest.param(
        f"{{ y = {STEM}(x, w) }}",
        "float[N,3,9,12] x",
        "steps of 2 leave a remainder of 9 elements along axis 2",
        id="an odd height",
    ),
    pytest.param(
        "{ y = Conv<strides = [2, 2], dilations = [2, 2], pads = [6, 6, 6, 6]>(x, w) }",
        "float[N,3,8,12] x",
        "dilated",
        id="dilations",
    ),
    pytest.param(
        "{ y = Conv<strides = [2, 2], pads = [3, 3, 3, 3], group = 2>(x, wide) }",
        "float[N,2,8,12] x",
        "its groups",
        id="groups",
    ),
    pytest.param(
        "{ y = Conv<strides = [2, 2], pads = [-1, 3, 3, 3]>(x, w) }",
        "float[N,3,12,12] x",
        "padding is negative",
        id="a crop",
    ),
]


@pytest.mark.parametrize(("body", "x", "reason"), DECLINED)
def test_declined(body: str, x: str, reason: str) -> None:
    before = stem_model(body, "float y", x=x)
    after, report = apply(FoldStrides(), before)
    assert after is before
    assert [reason in refusal.reason for refusal in report.refusals] == [True]


SILENT = [
    pytest.param("{ y = Conv<strides = [2, 2], pads = [1, 1, 1, 1]>(x, small) }", id="3x3"),
    pytest.param("{ y = Conv<strides = [2, 2], pads = [3, 1, 3, 1]>(x, flat) }", id="7x3"),
    pytest.param("{ y = Conv<pads = [3, 3, 3, 3]>(x, w) }", id="stride 1"),
    pytest.param("{ y = Conv<strides = [3, 3], pads = [3, 3, 3, 3]>(x, w) }", id="stride 3"),
    pytest.param("{ y = Conv<strides = [2, 1], pads = [3, 3, 3, 3]>(x, w) }", id="stride 1 along an axis"),
    pytest.param("{ y = Conv<strides = [8, 8]>(x, patch) }", id="patches"),
    pytest.param("{ m = Concat<axis = 1>(x, x) y = Conv<strides = [2, 2]>(m, six) }", id="6 channels"),
    pytest.param(
        "{ m = Concat<axis = 1>(x, x) y = Conv<strides = [2, 2], group = 6>(m, each) }",
        id="6 channels, each by itself",
    ),
    pytest.param(f"{{ n = Neg(w) y = {STEM}(x, n) }}", id="a computed weight"),
    pytest.param("{ y = ConvTranspose<strides = [2, 2]>(x, turned) }", id="a transposed Conv"),
]


@pytest.mark.parametrize("body", SILENT)
def test_skipped(body: str) -> None:
    before = stem_model(body, "float y")
    after, report = apply(FoldStrides(), before)
    assert after is before
    assert not report.refusals


def test_a_conv_of_one_axis_is_skipped() -> None:
    before = stem_model("{ y = Conv<strides = [2]>(x, line) }", "float y", x="float[N,3,12] x")
    after, report = apply(FoldStrides(), before)
    assert after is before
    assert not report.refusals


@pytest.mark.parametrize(
    ("step", "body", "outputs"),
    [
        pytest.param(
            FoldStrides(window=3),
            "{ y = Conv<strides = [2, 2], pads = [1, 1, 1, 1]>(x, small, b) }",
            "float[N,5,4,6] y",
            id="3x3",
        ),
        pytest.param(
            FoldStrides(window=3),
            "{ y = Conv<strides = [2, 2]>(x, small) }",
            "float[N,5,3,5] y",
            id="3x3, no padding",
        ),
        pytest.param(
            FoldStrides(channels=6),
            "{ m = Concat<axis = 1>(x, x) y = Conv<strides = [2, 2]>(m, six) }",
            "float[N,5,1,3] y",
            id="6 channels",
        ),
    ],
)
def test_options_take_more(step: FoldStrides, body: str, outputs: str) -> None:
    before = stem_model(body, outputs)
    after, report = apply(step, before)
    assert len(report.changes) == 1
    same_results(before, after, step)


def test_windows_with_gaps_are_skipped_whatever_the_options() -> None:
    before = stem_model("{ y = Conv<strides = [4, 4]>(x, small) }", "float y")
    after, report = apply(FoldStrides(window=1), before)
    assert after is before
    assert not report.refusals


@pytest.mark.parametrize(
    "kept", [Kept(("*/stem/*",)), Kept(("y",)), Kept(ops=("Conv",))], ids=["name", "output", "operator"]
)
def test_a_conv_that_the_user_keeps_in_fp32_stays(kept: Kept) -> None:
    before = stem_model(f"{{ y = {STEM}(x, w) }}")
    before.proto.graph.node[0].name = "/stem/Conv"
    after, report = apply(FoldStrides(), before, Context(kept=kept))
    assert after is before
    assert ["kept in FP32 by" in refusal.reason for refusal in report.refusals] == [True]


def test_an_old_opset_is_declined() -> None:
    before = stem_model(f"{{ y = {STEM}(x, w) }}", opset=6)
    after, report = apply(FoldStrides(), before)
    assert after is before
    assert "run upgrade-opset" in report.refusals[0].reason


def test_quantised_weights_stay_as_they_are() -> None:
    before = with_weights(
        """
        g (float[1,1,8,8] x, int8[2,1,7,7] q) => (float[1,2,1,1] y) <float s = {0.5}> {
            w = DequantizeLinear(q, s)
            y = Conv<strides = [2, 2]>(x, w)
        }""",
        {"q": np.ones((2, 1, 7, 7), np.int8)},
    )
    after, report = apply(FoldStrides(), before)
    assert after is before
    assert ["quantised" in refusal.reason for refusal in report.refusals] == [True]


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_a_model_in_lower_precision_keeps_its_type(dtype: int) -> None:
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    weight = numpy_helper.from_array(np.ones((2, 3, 7, 7)).astype(kind), "w")
    node = helper.make_node("Conv", ["x", "w"], ["y"], strides=[2, 2])
    shapes = (("x", [1, 3, 8, 8]), ("y", [1, 2, 1, 1]))
    ports = [helper.make_tensor_value_info(name, dtype, shape) for name, shape in shapes]
    made = helper.make_graph([node], "g", ports[:1], ports[1:], [weight])
    before = load(helper.make_model(made, opset_imports=[helper.make_opsetid("", 22)], ir_version=10))
    after, _ = apply(FoldStrides(), before)
    assert ops(after) == FOLDED
    assert {t.data_type for t in after.proto.graph.initializer if t.name != "w"} == {dtype, TensorProto.INT64}
