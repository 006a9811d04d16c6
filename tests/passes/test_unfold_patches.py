"""unfold-patches: Convs that become products, Convs that stay, equal results and layouts."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import apply, graph, keeps_results, ops, with_constants
from hypothesis import given, settings
from hypothesis import strategies as st
from needs import needs_rtx
from onnx import TensorProto, helper, numpy_helper
from paths import MODELS

from rewriter.base import Context, Kept
from rewriter.jobs.fix import api
from rewriter.model import Model, load
from rewriter.passes.unfold_patches import UnfoldPatches
from rewriter.pipeline.presets import DEFAULT_PRESET, PRESETS

PRODUCT = ["Reshape", "Transpose", "Reshape", "MatMul", "Add"]
BACK = ["Transpose", "Reshape"]
CONV = "Conv<kernel_shape = [2, 4], strides = [2, 4]>"


def _model(
    body: str,
    outputs: str = "float[N,5,3,2] y",
    *,
    opset: int = 17,
    x: str = "float[N,3,6,8] x",
    **weights: tuple[int, ...],
) -> Model:
    """A graph with random FP32 weights: `w` and `b` of a Conv with windows of 2 x 4, and more by shape."""
    targets = "<int64[3] flat = {0, 5, 6}, int64[3] other = {0, 10, 3}>"
    shapes = {"w": (5, 3, 2, 4), "b": (5,)} | weights
    return with_constants(f"{targets} {body}", shapes, x, outputs, opset=opset)


def _holds(before: Model, after: Model) -> None:
    keeps_results(before, after, UnfoldPatches())


UNFOLDED = [
    pytest.param(f"{{ y = {CONV}(x, w, b) }}", "float[N,5,3,2] y", [*PRODUCT, *BACK], id="nothing after it"),
    pytest.param(f"{{ y = {CONV}(x, w) }}", "float[N,5,3,2] y", [*PRODUCT, *BACK], id="no bias: zeros"),
    pytest.param(
        f"{{ c = {CONV}(x, w, b) y = Transpose<perm = [0, 2, 3, 1]>(c) }}",
        "float[N,3,2,5] y",
        [*PRODUCT, "Reshape"],
        id="channels last",
    ),
    pytest.param(
        f"{{ c = {CONV}(x, w, b) f = Reshape(c, flat) y = Transpose<perm = [0, 2, 1]>(f) }}",
        "float[N,6,5] y",
        PRODUCT,
        id="flat, channels last",
    ),
    pytest.param(
        f"{{ c = {CONV}(x, w, b) f = Reshape(c, flat) y = Relu(f) }}",
        "float[N,5,6] y",
        [*PRODUCT, *BACK, "Reshape", "Relu"],
        id="flat, channels first",
    ),
    pytest.param(
        f"{{ c = {CONV}(x, w, b) y = Transpose<perm = [0, 3, 1, 2]>(c) }}",
        "float[N,2,5,3] y",
        [*PRODUCT, *BACK, "Transpose"],
        id="a Transpose to some other layout",
    ),
    pytest.param(
        f"{{ c = {CONV}(x, w, b) f = Reshape(c, other) y = Transpose<perm = [0, 2, 1]>(f) }}",
        "float[N,3,10] y",
        [*PRODUCT, *BACK, "Reshape", "Transpose"],
        id="a Reshape that cuts channels",
    ),
    pytest.param(
        f"{{ c = {CONV}(x, w, b) t = Transpose<perm = [0, 2, 3, 1]>(c) r = Relu(c) }}",
        "float[N,3,2,5] t, float[N,5,3,2] r",
        [*PRODUCT, *BACK, "Transpose", "Relu"],
        id="other consumers read it",
    ),
    pytest.param(
        f"{{ c = {CONV}(x, w, b) y = Transpose<perm = [0, 2, 3, 1]>(c) }}",
        "float[N,3,2,5] y, float[N,5,3,2] c",
        [*PRODUCT, "Reshape", *BACK],
        id="its result is an output, too",
    ),
    pytest.param(
        f"{{ c = {CONV}(x, w, b) f = Reshape(c, flat) y = Transpose<perm = [0, 2, 1]>(f) }}",
        "float[N,6,5] y, float[N,5,6] f",
        [*PRODUCT, *BACK, "Reshape", "Transpose"],
        id="its flat result is an output, too",
    ),
    pytest.param(
        "{ n = Neg(b) y = Conv<strides = [2, 4]>(x, w, n) }",
        "float[N,5,3,2] y",
        ["Neg", *PRODUCT, *BACK],
        id="a computed bias, no kernel_shape",
    ),
    pytest.param(
        '{ y = Conv<strides = [2, 4], auto_pad = "SAME_UPPER">(x, w, b) }',
        "float[N,5,3,2] y",
        [*PRODUCT, *BACK],
        id="auto_pad that adds nothing",
    ),
    pytest.param(
        "{ y = Conv<strides = [1, 4], dilations = [3, 1]>(x, high, b) }",
        "float[N,5,6,2] y",
        [*PRODUCT, *BACK],
        id="windows of 1 x 4, and a dilation of an axis of 1",
    ),
]


@pytest.mark.parametrize("opset", [11, 13, 17, 18, 21, 23])
@pytest.mark.parametrize(("body", "outputs", "left"), UNFOLDED)
def test_unfolded(body: str, outputs: str, left: list[str], opset: int) -> None:
    before = _model(body, outputs, opset=opset, high=(5, 3, 1, 4))
    after, report = apply(UnfoldPatches(), before)
    assert sorted(ops(after)) == sorted(left)
    assert len(report.changes) == 1
    assert not report.refusals
    _holds(before, after)


@pytest.mark.parametrize("opset", [17, 18, 21, 23])
def test_flattened_by_shape_arithmetic(opset: int) -> None:
    """As torch writes it for a dynamic batch: how many places there are is known from the batch alone."""
    body = f"""{{
        c = {CONV}(x, w, b)
        s = Shape(c)
        zero = Constant<value_ints = [0]>()
        two = Constant<value_ints = [2]>()
        rest = Constant<value_ints = [-1]>()
        head = Slice(s, zero, two)
        shape = Concat<axis = 0>(head, rest)
        f = Reshape(c, shape)
        y = Transpose<perm = [0, 2, 1]>(f)
    }}"""
    before = _model(body, "float[N,6,5] y", opset=opset)
    after, _ = apply(UnfoldPatches(), before)
    assert ops(after) == PRODUCT
    _holds(before, after)


def test_new_nodes_are_named_after_the_conv_and_results_keep_their_names() -> None:
    before = _model(f"{{ y = {CONV}(x, w) }}")
    before.proto.graph.node[0].name = "/patch/Conv"
    after, report = apply(UnfoldPatches(), before)
    names = [node.name for node in after.proto.graph.node]
    assert all(name.startswith("/patch/Conv/unfolded") for name in names)
    assert names[3:5] == ["/patch/Conv/unfolded", "/patch/Conv/unfolded/Add"]
    assert {t.name: tuple(t.dims) for t in after.proto.graph.initializer}.items() >= {
        "w/unfolded": (24, 5),
        "w/unfolded/bias": (5,),
    }.items()
    assert (report.changes[0].node, report.changes[0].what) == (
        "/patch/Conv",
        "a product of 6 patches of 24 elements",
    )


def test_large_weights_stay_outside_the_proto() -> None:
    before = _model(f"{{ y = {CONV}(x, w) }}", "float[N,40,3,2] y", w=(40, 3, 2, 4))
    after, _ = apply(UnfoldPatches(), before)
    assert after.weights.keys() == {"w/unfolded"}
    assert not after.weights["w/unfolded"].flags.writeable
    assert before.weights.keys() == {"w"}


def test_convs_that_share_a_weight_share_the_unfolded_one() -> None:
    before = _model(
        f"{{ y = {CONV}(x, w, b) r = Relu(x) z = {CONV}(r, w, b) t = Transpose(w) }}",
        "float[N,5,3,2] y, float[N,5,3,2] z, float[4,2,3,5] t",
    )
    after, report = apply(UnfoldPatches(), before)
    assert len(report.changes) == 2
    weights = [node.input[1] for node in after.proto.graph.node if node.op_type == "MatMul"]
    assert weights == ["w/unfolded"] * 2
    assert "w" in {t.name for t in after.proto.graph.initializer}, "other consumers read it"
    _holds(before, after)


DECLINED = [
    pytest.param(
        f"{{ y = {CONV}(x, w) }}", "float[N,3,7,8] x", "leave a remainder of 7 elements", id="remainder"
    ),
    pytest.param(
        f"{{ y = {CONV}(x, w) }}", "float[N,3,H,8] x", "size of axis 2 of x is not known", id="dynamic height"
    ),
    pytest.param(
        '{ y = Conv<strides = [2, 4], auto_pad = "SAME_UPPER">(x, w) }',
        "float[N,3,6,9] x",
        "leave a remainder of 9 elements along axis 3",
        id="auto_pad that pads",
    ),
    pytest.param(
        "{ y = Conv<strides = [2, 4], pads = [1, 0, 1, 0]>(x, w) }", "float[N,3,6,8] x", "it pads", id="pads"
    ),
    pytest.param(
        "{ y = Conv<strides = [2, 4], dilations = [2, 1]>(x, w) }",
        "float[N,3,6,8] x",
        "windows are dilated",
        id="dilations",
    ),
    pytest.param(
        "{ y = Conv<strides = [2, 4], group = 2>(x, w4) }", "float[N,2,6,8] x", "its groups", id="groups"
    ),
    pytest.param(
        "{ y = Conv<strides = [1, 1, 2, 2]>(x, w6) }",
        "float[1,3,4,4,4,4] x",
        "4 spatial axes",
        id="four axes",
    ),
]


@pytest.mark.parametrize(("body", "x", "reason"), DECLINED)
def test_declined(body: str, x: str, reason: str) -> None:
    before = _model(body, "float y", x=x, w4=(4, 1, 2, 4), w6=(5, 3, 1, 1, 2, 2))
    after, report = apply(UnfoldPatches(), before)
    assert after is before
    assert [reason in refusal.reason for refusal in report.refusals] == [True]


SILENT = [
    pytest.param("{ y = Conv(x, one) }", id="windows of one element"),
    pytest.param("{ y = Conv<strides = [2, 2]>(x, one) }", id="windows of one element, with gaps"),
    pytest.param("{ y = Conv<strides = [1, 2]>(x, w) }", id="windows that overlap"),
    pytest.param("{ y = Conv<strides = [3, 4]>(x, w) }", id="gaps"),
    pytest.param(f"{{ n = Neg(w) y = {CONV}(x, n) }}", id="a computed weight"),
    pytest.param("{ y = ConvTranspose<strides = [2, 4]>(x, turned) }", id="a transposed Conv"),
    pytest.param("{ m = Concat<axis = 1>(x, x) y = Conv<strides = [2, 4]>(m, six) }", id="6 channels"),
    pytest.param(
        "{ m = Concat<axis = 1>(x, x) y = Conv<strides = [2, 4], group = 6>(m, each) }",
        id="6 channels, each by itself",
    ),
]


@pytest.mark.parametrize("body", SILENT)
def test_skipped(body: str) -> None:
    before = _model(
        body, "float y", one=(5, 3, 1, 1), turned=(3, 5, 2, 4), six=(5, 6, 2, 4), each=(6, 1, 2, 4)
    )
    after, report = apply(UnfoldPatches(), before)
    assert after is before
    assert not report.refusals


def test_quantised_weights_stay_as_they_are() -> None:
    before = graph(
        """
        g (float[1,1,2,2] x) => (float[1,1,1,1] y) <int8[1,1,2,2] q = {1, 2, 3, 4}, float s = {0.5}> {
            w = DequantizeLinear(q, s)
            y = Conv<strides = [2, 2]>(x, w)
        }"""
    )
    after, report = apply(UnfoldPatches(), before)
    assert after is before
    assert ["quantised" in refusal.reason for refusal in report.refusals] == [True]


def test_doubles_are_declined() -> None:
    before = graph(
        """
        g (double[1,1,2,2] x) => (double[1,1,1,1] y) <double[1,1,2,2] w = {1, 2, 3, 4}> {
            y = Conv<strides = [2, 2]>(x, w)
        }"""
    )
    after, report = apply(UnfoldPatches(), before)
    assert after is before
    assert ["of a type" in refusal.reason for refusal in report.refusals] == [True]


def test_an_old_opset_is_declined() -> None:
    before = _model(f"{{ y = {CONV}(x, w) }}", opset=6)
    after, report = apply(UnfoldPatches(), before)
    assert after is before
    assert "run upgrade-opset" in report.refusals[0].reason


KEPT = [
    pytest.param(Kept(("*/patch/*",)), id="by pattern"),
    pytest.param(Kept(("c",)), id="by its output"),
    pytest.param(Kept(ops=("Conv",)), id="by its operator"),
]
LAST = f"{{ c = {CONV}(x, w, b) f = Reshape(c, flat) y = Transpose<perm = [0, 2, 1]>(f) }}"


@pytest.mark.parametrize("kept", KEPT)
def test_a_conv_that_the_user_keeps_in_fp32_stays(kept: Kept) -> None:
    before = _model(LAST, "float[N,6,5] y")
    before.proto.graph.node[0].name = "/patch/Conv"
    after, report = apply(UnfoldPatches(), before, Context(kept=kept))
    assert after is before
    assert ["kept in FP32 by" in refusal.reason for refusal in report.refusals] == [True]


@pytest.mark.parametrize("name", ["f", "y"])
def test_a_view_that_the_user_keeps_in_fp32_stays(name: str) -> None:
    before = _model(LAST, "float[N,6,5] y")
    after, report = apply(UnfoldPatches(), before, Context(kept=Kept((name,))))
    assert ops(after) == [*PRODUCT, *BACK, "Reshape", "Transpose"]
    assert len(report.changes) == 1
    _holds(before, after)


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_a_model_in_lower_precision_keeps_its_type(dtype: int) -> None:
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    weight = numpy_helper.from_array(np.ones((2, 3, 2)).astype(kind), "w")
    node = helper.make_node("Conv", ["x", "w"], ["y"], strides=[2])
    ports = [helper.make_tensor_value_info(n, dtype, s) for n, s in (("x", [1, 3, 4]), ("y", [1, 2, 2]))]
    made = helper.make_graph([node], "g", ports[:1], ports[1:], [weight])
    before = load(helper.make_model(made, opset_imports=[helper.make_opsetid("", 22)], ir_version=10))
    after, _ = apply(UnfoldPatches(), before)
    assert ops(after) == [*PRODUCT, "Transpose"]
    held = {t.name: t.data_type for t in after.proto.graph.initializer}
    assert (held["w/unfolded"], held["w/unfolded/bias"]) == (dtype, dtype)


@st.composite
def convs(draw: st.DrawFn) -> tuple[Model, bool]:
    """A Conv of one to three axes whose windows step by their size, and whether they leave nothing over."""
    kernel = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda k: np.prod(k) > 1))
    counts = [draw(st.integers(1, 4)) for _ in kernel]
    over = [draw(st.sampled_from([0, 0, 0, 1])) % k for k in kernel]
    read, out, batch = draw(st.integers(1, 5)), draw(st.integers(1, 6)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    constants = {"w": rng.standard_normal((out, read, *kernel)), "b": rng.standard_normal(out)}
    inputs = ["x", "w", "b"] if draw(st.booleans()) else ["x", "w"]
    behind = draw(st.sampled_from(["nothing", "last", "flat", "turned"]))
    nodes = [helper.make_node("Conv", inputs, ["y" if behind == "nothing" else "c"], strides=kernel)]
    axes = list(range(len(kernel) + 2))
    held = [numpy_helper.from_array(v.astype(np.float32), n) for n, v in constants.items() if n in inputs]
    if behind == "last":
        nodes.append(helper.make_node("Transpose", ["c"], ["y"], perm=[0, *axes[2:], 1]))
    elif behind == "turned":
        nodes.append(helper.make_node("Transpose", ["c"], ["y"], perm=axes[::-1]))
    elif behind == "flat":
        held.append(numpy_helper.from_array(np.asarray([0, out, -1]), "shape"))
        nodes.append(helper.make_node("Reshape", ["c", "shape"], ["f"]))
        nodes.append(helper.make_node("Transpose", ["f"], ["y"], perm=[0, 2, 1]))
    sizes = [c * k + o for c, k, o in zip(counts, kernel, over, strict=True)]
    rows: int | str = batch if draw(st.booleans()) else "N"
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows, read, *sizes])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    made = helper.make_graph(nodes, "g", [x], [y], held)
    opset = draw(st.sampled_from([11, 13, 17, 18, 21, 23]))
    source = helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return load(onnx.shape_inference.infer_shapes(source)), not any(over)


@settings(max_examples=150, deadline=None)
@given(convs())
def test_any_conv_of_patches_keeps_its_results(made: tuple[Model, bool]) -> None:
    before, divides = made
    after, report = apply(UnfoldPatches(channels=0), before)
    if not divides:
        assert after is before
        assert ["leave a remainder" in refusal.reason for refusal in report.refusals] == [True]
        return
    assert "Conv" not in ops(after)
    assert ops(after).count("MatMul") == 1
    _holds(before, after)


PATCHES = {"vit": 1, "vit_massive": 1, "swin": 1, "convnext": 4, "nafnet": 2, "resnet": 0, "mobilenet_v2": 0}
"""Convs of the case models that become products."""
IMAGES = PATCHES | {"convnext": 1, "nafnet": 0}
"""Of these, the ones that read images."""


@pytest.mark.parametrize("name", PATCHES)
def test_all_patches_of_a_case_are_unfolded(name: str) -> None:
    """That results stay is test_every_pass's; here, that none is missed."""
    for step, wanted in ((UnfoldPatches(), IMAGES), (UnfoldPatches(channels=0), PATCHES)):
        _, report = apply(step, load(MODELS / f"{name}.onnx"))
        assert len(report.changes) == wanted[name]
        assert not report.refusals


@pytest.mark.parametrize(("most", "changes"), [(2, 0), (3, 1), (0, 1)])
def test_more_channels_than_the_option_says_stay(most: int, changes: int) -> None:
    _, report = apply(UnfoldPatches(channels=most), _model(f"{{ y = {CONV}(x, w, b) }}"))
    assert len(report.changes) == changes


@pytest.mark.parametrize(("depth", "changes"), [(24, 1), (25, 0), (0, 0)])
def test_deep_sums_are_taken_whatever_their_channels(depth: int, changes: int) -> None:
    _, report = apply(UnfoldPatches(channels=1, depth=depth), _model(f"{{ y = {CONV}(x, w, b) }}"))
    assert len(report.changes) == changes


def _pipeline() -> str:
    """The default one, with all patches."""
    return PRESETS[DEFAULT_PRESET].pipeline.replace("unfold-patches", "unfold-patches{channels=0}")


def _fixed(name: str, **options: Any) -> Any:
    model = MODELS / f"{name}.onnx"
    return api.fix(model, passes=_pipeline(), inputs=model.with_suffix(".npz"), **options)


@pytest.mark.parametrize("name", ["vit", "swin", "convnext", "nafnet"])
def test_the_product_gets_an_fp32_epilogue(name: str) -> None:
    """MatMul in FP16, Cast, Add in FP32: the form that sums in FP32."""
    result = _fixed(name, build=False)
    assert result.verdict.passed
    nodes = list(result.proto.graph.node)
    readers = {name: node for node in nodes for name in node.input}
    products = [n for n in nodes if n.name.endswith("/unfolded")]
    assert len(products) == PATCHES[name]
    for product in products:
        cast = readers[product.output[0]]
        add = readers[cast.output[0]]
        assert (cast.op_type, cast.attribute[0].i, add.op_type) == ("Cast", TensorProto.FLOAT, "Add")
        assert add.name == f"{product.name}/Add"


@pytest.mark.parametrize("name", ["vit", "swin"])
def test_the_layout_of_the_exporter_is_the_products_own(name: str) -> None:
    """No Transpose stands between the product and the tokens."""
    after = _fixed(name, verify=False).proto.graph.node
    moved = [a.op_type for a, b in pairwise(after) if a.name.startswith("x") or "/unfolded" in a.name]
    assert moved.count("Transpose") == 1


@pytest.mark.parametrize("passes", ["unfold-patches,rescale", "rescale,unfold-patches"])
def test_a_conv_without_bias_goes_through_rescale(passes: str) -> None:
    """Its result leaves FP16, and the zeros of the epilogue take no factor away."""
    before = _model(f"{{ c = {CONV}(x, w) y = Conv(c, v) }}", "float[N,2,3,2] y", v=(2, 5, 1, 1))
    source = before.whole()
    for tensor in source.graph.initializer:
        scale = {"w": 1e5, "v": 1e-5}.get(tensor.name)
        if scale:
            value = numpy_helper.to_array(tensor) * np.float32(scale)
            tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    samples = [{"x": np.random.default_rng(1).standard_normal((2, 3, 6, 8)).astype(np.float32)}]
    result = api.fix(source, passes=f"{passes},mixed-precision", inputs=samples, build=False)
    assert result.verdict is not None and result.verdict.passed
    assert result.plan is not None
    assert {"overflow"}.isdisjoint(decision.rule for decision in result.plan.decisions)
    assert result.plan.exponents


def test_a_kept_conv_stays_by_the_saved_plan_too(tmp_path: Path) -> None:
    source, plan = _model(LAST, "float[N,6,5] y").whole(), tmp_path / "plan.json"
    samples = [{"x": np.ones((2, 3, 6, 8), np.float32)}]
    first = api.fix(source, passes=_pipeline(), inputs=samples, build=False, keep_fp32=["c"], save_plan=plan)
    assert "Conv" in ops(load(first.proto))
    again = api.fix(source, passes=_pipeline(), inputs=samples, build=False, plan=plan)
    assert again.proto.SerializeToString() == first.proto.SerializeToString()


def test_a_plan_of_unfolded_patches_fits_them_again(tmp_path: Path) -> None:
    first = _fixed("swin", verify=False, save_plan=tmp_path / "plan.json")
    again = _fixed("swin", verify=False, plan=tmp_path / "plan.json")
    assert "Conv" not in ops(load(again.proto))
    assert again.proto.SerializeToString() == first.proto.SerializeToString()


@needs_rtx
@pytest.mark.parametrize("name", ["vit", "swin", "convnext"])
def test_tensorrt_builds_the_unfolded_model(name: str) -> None:
    result = _fixed(name)
    assert result.verdict is not None
    build = next(check for check in result.verdict.checks if check.name == "build")
    assert build.passed
    assert "types as planned" in build.summary
