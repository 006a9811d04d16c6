"""fuse-layer-norm: LayerNormalization with equal results, and refusals with their reasons."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from graphs import apply, graph, model, ops, random_feeds, run
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, numpy_helper
from paths import MODELS
from written_norms import AFFINE, BLOCKED, CHANNEL, CORE, INPUTS, LAYER_NORMS, VARIANCE, build, units

from rewriter.base import Refusal
from rewriter.graph import TAG, attribute
from rewriter.model import Array, Model, load
from rewriter.passes.fuse_layer_norm import FuseLayerNorm

SINGLE = 1e-6
"""Relative L2 error of one norm of normal data: 2^-24 = 6e-8 for each of some ten roundings."""


def norm_node(source: Model) -> onnx.NodeProto:
    nodes: list[onnx.NodeProto] = [n for n in source.proto.graph.node if n.op_type == "LayerNormalization"]
    (node,) = nodes
    return node


def constant(source: Model, name: str) -> Array:
    return next(source.array(t) for t in source.proto.graph.initializer if t.name == name)


def assert_close(before: Model, after: Model, tolerance: float = SINGLE) -> None:
    feeds = random_feeds(before)
    for a, b in zip(run(before, feeds), run(after, feeds), strict=True):
        assert a.dtype == b.dtype
        assert np.linalg.norm(a.astype(np.float64) - b) <= tolerance * np.linalg.norm(a.astype(np.float64))


def test_the_example() -> None:
    before, after = model(FuseLayerNorm.before), model(FuseLayerNorm.after)
    result, report = apply(FuseLayerNorm(), before)
    assert ops(result) == ops(after)
    node, wanted = norm_node(result), norm_node(after)
    assert (node.input, node.output) == (wanted.input, wanted.output)
    assert [attribute(node, k) for k in ("axis", "epsilon")] == [-1, float(np.float32(1e-5))]
    assert not result.proto.graph.initializer
    assert {p.key: p.value for p in node.metadata_props} == {TAG: "fuse-layer-norm"}
    assert [(c.node, c.what) for c in report.changes] == [("Add(y)", "9 nodes became LayerNormalization")]
    assert_close(before, result)
    assert_close(after, result, 0.0)


@pytest.mark.parametrize(("body", "opset"), LAYER_NORMS)
def test_every_way_to_write_it_becomes_the_operator(body: str, opset: int) -> None:
    before = build(body, opset=opset)
    result, report = apply(FuseLayerNorm(), before)
    assert [op for op in ops(result) if op != "Identity"] == ["LayerNormalization"]
    assert list(norm_node(result).input) == ["x", "s", "b"]
    assert attribute(norm_node(result), "epsilon") == float(np.float32(1e-5))
    assert not report.refusals
    assert_close(before, result)
    again, second = apply(FuseLayerNorm(), result)
    assert again.same_as(result)
    assert not second.changes


AFFINE_PARTS = [
    pytest.param(f"{CORE} y = Identity(n)", 1, None, id="no affine part"),
    pytest.param(f"{CORE} y = Mul(n, s)", 0, None, id="only a scale"),
    pytest.param(f"{CORE} y = Add(b, n)", 1, "b", id="only a bias"),
]


@pytest.mark.parametrize(("body", "made", "bias"), AFFINE_PARTS)
def test_a_missing_scale_becomes_ones_and_a_missing_bias_is_left_out(
    body: str, made: int, bias: str | None
) -> None:
    before = build(body)
    result, _ = apply(FuseLayerNorm(), before)
    node = norm_node(result)
    if made:
        assert np.array_equal(constant(result, node.input[1]), np.ones(8, np.float32))
    else:
        assert node.input[1] == "s"
    assert list(node.input[2:]) == ([bias] if bias else [])
    assert_close(before, result)


def test_ones_need_sizes() -> None:
    before = build(f"{CORE} y = Identity(n)", "float[2,4,k] x", "float[2,4,k] y")
    _, report = apply(FuseLayerNorm(), before)
    assert [r.reason for r in report.refusals] == [
        "it has no scale, and a scale of ones needs the sizes of its axes, which are not known"
    ]


def test_a_scale_tells_the_size() -> None:
    text = f"""g (float[2,4,k] x) => (float[2,4,k] y)
        <float two = {{2.0}}, float eps = {{0.00001}}, float[8] s = {{1, 2, 3, 4, 5, 6, 7, 8}}> {{
            {CORE} y = Mul(n, s)
        }}"""
    result, _ = apply(FuseLayerNorm(), graph(text))
    assert ops(result) == ["LayerNormalization"]
    assert norm_node(result).input[1] == "s"


STAYS = [
    pytest.param("z", "float[2,4,8] z", "z is no bias: it is computed", id="a residual"),
    pytest.param("z", "float[1,4,8] z", "z is no bias: it is computed", id="a computed broadcast"),
    pytest.param(
        "k",
        "float[8] unused",
        "k is no bias: it is a constant with shape [4, 8], not that of the normalised axes",
        id="a constant per token",
    ),
]


@pytest.mark.parametrize(("other", "extra", "reason"), STAYS)
@pytest.mark.parametrize("swapped", [False, True])
def test_a_residual_add_is_not_a_bias(other: str, extra: str, reason: str, swapped: bool) -> None:
    values = ", ".join(str(i / 8) for i in range(32))
    add = f"Add({other}, w)" if swapped else f"Add(w, {other})"
    before = graph(f"""g (float[2,4,8] x, float[8] s, {extra}) => (float[2,4,8] y)
        <float two = {{2.0}}, float eps = {{0.00001}}, float[4,8] k = {{{values}}}> {{
            {CORE} w = Mul(n, s) y = {add}
        }}""")
    result, report = apply(FuseLayerNorm(), before)
    assert ops(result) == ["LayerNormalization", "Add"]
    assert list(norm_node(result).input) == ["x", "s"]
    assert report.refusals == (Refusal("Add(y)", f"stays, for {reason}"),)
    assert_close(before, result)


def test_a_residual_of_batch_size_one_is_not_a_bias() -> None:
    before = build(
        f"{CORE} w = Mul(n, s) y = Add(w, z)", "float[1,1,8] x, float[8] s, float[1,1,8] z", "float[1,1,8] y"
    )
    result, report = apply(FuseLayerNorm(), before)
    assert ops(result) == ["LayerNormalization", "Add"]
    assert [r.node for r in report.refusals] == ["Add(y)"]


def test_a_computed_modulation_is_not_a_scale() -> None:
    body = f"{CORE} o = Add(g, one) w = Mul(n, o) y = Add(w, z)"
    before = build(body, "float[2,4,8] x, float[2,1,8] g, float[2,1,8] z")
    result, report = apply(FuseLayerNorm(), before)
    assert sorted(ops(result)) == ["Add", "Add", "LayerNormalization", "Mul"]
    assert [r.node for r in report.refusals] == ["Mul(w)"]
    assert_close(before, result)


def test_a_computed_scale_of_the_right_shape_is_a_scale() -> None:
    before = build(f"{CORE} o = Add(s, one) y = Mul(n, o)")
    result, report = apply(FuseLayerNorm(), before)
    assert ops(result) == ["Add", "LayerNormalization"]
    assert norm_node(result).input[1] == "o"
    assert not report.refusals
    assert_close(before, result)


def test_a_computed_scale_of_unknown_shape_is_none() -> None:
    body = f"{CORE} u = Reshape(s, t) y = Mul(n, u)"
    before = build(body, "float[2,4,8] x, float[8] s, int64[k] t", "float[a,c,d] y")
    result, report = apply(FuseLayerNorm(), before)
    assert ops(result) == ["LayerNormalization", "Reshape", "Mul"]
    assert report.refusals == (Refusal("Mul(y)", "stays, for u is no scale: it is computed"),)


def test_a_scalar_after_the_norm_stays() -> None:
    before = build(f"{CORE} y = Mul(n, half)")
    result, _ = apply(FuseLayerNorm(), before)
    assert ops(result) == ["LayerNormalization", "Mul"]
    assert_close(before, result)


@pytest.mark.parametrize(("body", "output", "reason"), BLOCKED)
def test_refusals_and_their_reasons(body: str, output: str, reason: str) -> None:
    before = build(body, output=output)
    result, report = apply(FuseLayerNorm(), before)
    assert result.same_as(before)
    (refusal,) = report.refusals
    assert reason in refusal.reason
    assert refusal.node in {f"Add({t})" for t in "ny"} | {f"Mul({t})" for t in "wy"} | {"Div(n)"}


def test_below_opset_17_there_is_no_such_operator() -> None:
    before = build(f"{CORE} {AFFINE}", opset=16)
    _, report = apply(FuseLayerNorm(), before)
    assert report.refusals == (Refusal("Add(y)", "it needs opset 17, the model has 16: run upgrade-opset"),)


HALF = "float16[2,4,8] x, float16[8] s, float16[8] b"


def test_an_fp16_epsilon_is_kept_exactly() -> None:
    epsilon = np.float16(1e-5)
    proto = build(f"{CORE} {AFFINE}").whole()
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    for tensor in proto.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            half = numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(numpy_helper.from_array(half, tensor.name))
    result, _ = apply(FuseLayerNorm(), load(proto))
    assert attribute(norm_node(result), "epsilon") == float(epsilon) != float(np.float32(1e-5))
    assert result.signature.outputs[0].dtype == TensorProto.FLOAT16


def test_casts_round_fp32_statistics_go_with_it() -> None:
    body = f"c = Cast<to = 1>(x) {CORE.replace('(x', '(c')} h = Cast<to = 10>(n) w = Mul(h, s) y = Add(w, b)"
    before = build(body, HALF, "float16[2,4,8] y")
    result, _ = apply(FuseLayerNorm(), before)
    assert ops(result) == ["LayerNormalization"]
    assert list(norm_node(result).input) == ["x", "s", "b"]
    assert_close(before, result, 2.0**-10)  # two roundings to FP16 of 2^-11 each, which may fall apart


def channel(axes: str = "[1]", weights: str = "float[1,4,1,1] s = {1, 2, 3, 4}") -> Model:
    return graph(f"""g (float[2,4,6,5] x) => (float[2,4,6,5] y)
        <float two = {{2.0}}, float eps = {{0.00001}}, float[4,1,1] b = {{-1, 0, 1, 2}}, {weights}> {{
            {CHANNEL.replace("[1]", axes)} e = Add(v, eps) r = Sqrt(e) n = Div(d, r)
            w = Mul(s, n) y = Add(w, b)
        }}""")


def test_a_norm_over_channels_is_an_island_by_default() -> None:
    _, report = apply(FuseLayerNorm(), channel())
    (refusal,) = report.refusals
    assert refusal.node == "Add(y)"
    assert refusal.reason.startswith("it normalises axes [1] of 4, not the last ones: it stays decomposed")


def test_the_channel_axis_transposed() -> None:
    before = channel()
    result, report = apply(FuseLayerNorm(channel_axis="transpose"), before)
    assert ops(result) == ["Transpose", "LayerNormalization", "Transpose"]
    perms = [attribute(n, "perm") for n in result.proto.graph.node if n.op_type == "Transpose"]
    assert perms == [[0, 2, 3, 1], [0, 3, 1, 2]]
    assert constant(result, norm_node(result).input[1]).tolist() == [1, 2, 3, 4]
    assert constant(result, norm_node(result).input[2]).tolist() == [-1, 0, 1, 2]
    assert [c.what for c in report.changes] == ["9 nodes became Transpose, LayerNormalization, Transpose"]
    assert_close(before, result)


def test_several_axes_take_a_scale_that_is_broadcast_along_them() -> None:
    before = graph(f"""g (float[2,3,4,5] x) => (float[2,3,4,5] y)
        <float two = {{2.0}}, float eps = {{0.00001}}, float[4,1] s = {{1, 2, 3, 4}}> {{
            {VARIANCE.replace("[-1]", "[-2, -1]")} e = Add(v, eps) r = Sqrt(e) n = Div(d, r) y = Mul(n, s)
        }}""")
    result, _ = apply(FuseLayerNorm(), before)
    assert attribute(norm_node(result), "axis") == -2
    assert constant(result, norm_node(result).input[1]).shape == (4, 5)
    assert_close(before, result)


def test_two_norms_share_their_constants() -> None:
    second = CORE.replace("(x", "(y1").replace("n = ", "n2 = ")
    for name in "mdqver":
        second = second.replace(f"{name} = ", f"{name}2 = ").replace(f"({name},", f"({name}2,")
        second = second.replace(f"({name})", f"({name}2)").replace(f", {name})", f", {name}2)")
    before = build(f"{CORE} w = Mul(n, s) y1 = Add(w, b) {second} w2 = Mul(n2, s) y = Add(w2, b)")
    result, report = apply(FuseLayerNorm(), before)
    assert ops(result) == ["LayerNormalization", "LayerNormalization"]
    assert len(report.changes) == 2
    assert_close(before, result)


def test_inside_a_subgraph() -> None:
    before = model(f"""
        <ir_version: 8, opset_import: ["" : 17]>
        g (bool t, {INPUTS}) => (float[2,4,8] y) <float two = {{2.0}}, float eps = {{0.00001}}> {{
            y = If (t) <
                then_branch = yes () => (float[2,4,8] y1) {{ {CORE} w = Mul(n, s) y1 = Add(w, b) }},
                else_branch = no () => (float[2,4,8] y2) {{ {CORE} y2 = Neg(n) }}
            >
        }}""")
    result, report = apply(FuseLayerNorm(), before)
    branches = {a.name: [n.op_type for n in a.g.node] for a in result.proto.graph.node[0].attribute}
    assert branches == {"then_branch": ["LayerNormalization"], "else_branch": ["LayerNormalization", "Neg"]}
    assert len(report.changes) == 2
    for choice in (True, False):
        feeds = {**random_feeds(before), "t": np.array(choice)}
        np.testing.assert_allclose(run(before, feeds)[0], run(result, feeds)[0], rtol=1e-5, atol=1e-6)


@st.composite
def layer_norms(draw: st.DrawFn) -> Model:
    """A LayerNorm over any axes of any small shape, with weights written in any way that broadcasts."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    rank = len(shape)
    axes = sorted(draw(st.sets(st.integers(0, rank - 1), min_size=1)))
    written = [a - rank if draw(st.booleans()) else a for a in axes]
    full = [d if i in axes else 1 for i, d in enumerate(shape)]
    dims = full[draw(st.integers(0, axes[0])) :]
    values = ", ".join(str(i + 1) for i in range(int(np.prod(dims))))
    affine = draw(st.sampled_from(["y = Identity(n)", "y = Mul(k, n)", "w = Mul(n, k) y = Add(k, w)"]))
    return graph(f"""g (float{shape} x) => (float{shape} y)
        <float two = {{2.0}}, float eps = {{0.00001}}, float{dims} k = {{{values}}}> {{
            {CORE.replace("[-1]", str(written))} {affine}
        }}""")


@settings(max_examples=60, deadline=None)
@given(layer_norms())
def test_any_axes_and_any_weights(before: Model) -> None:
    result, report = apply(FuseLayerNorm(channel_axis="transpose"), before)
    assert "LayerNormalization" in ops(result)
    assert len(report.changes) == 1
    feeds = random_feeds(before)
    (a,), (b,) = run(before, feeds), run(result, feeds)
    # x is rounded at 2^-24 |x| before it is divided by sqrt(variance + eps), here at least 3e-3; |k| <= 625
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4 * max(1.0, float(np.abs(a).max())))


CASES = [("vit", 25), ("vit_massive", 25), ("bert", 5), ("convnext", 10), ("swin", 11), ("rtdetr", 9)]


@pytest.mark.parametrize(("case", "count"), CASES)
def test_real_exports(case: str, count: int) -> None:
    proto = onnx.version_converter.convert_version(onnx.load(MODELS / f"{case}.onnx"), 17)
    before = load(proto)
    result, report = apply(FuseLayerNorm(), before)
    assert len(report.changes) == count
    assert not report.refusals
    assert units(result) == []
    with np.load(MODELS / f"{case}.npz") as sample:
        feeds = dict(sample)
    for a, b in zip(run(before, feeds), run(result, feeds), strict=True):
        assert np.linalg.norm(a - b) <= FuseLayerNorm.exactness.tolerance * np.linalg.norm(a)


def test_nafnet_with_transposes() -> None:
    before = load(onnx.version_converter.convert_version(onnx.load(MODELS / "nafnet.onnx"), 17))
    result, report = apply(FuseLayerNorm(channel_axis="transpose"), before)
    assert len(report.changes) == 10
    with np.load(MODELS / "nafnet.npz") as sample:
        feeds = dict(sample)
    (a,), (b,) = run(before, feeds), run(result, feeds)
    assert np.linalg.norm(a - b) <= FuseLayerNorm.exactness.tolerance * np.linalg.norm(a)


@pytest.mark.parametrize(
    ("rows", "fits"),
    [
        pytest.param("1, 2, 1, 2, 1, 2", True, id="the same in each row"),
        pytest.param("1, 2, 1, 2, 1, 3", False, id="different rows"),
    ],
)
def test_a_scale_may_be_repeated_for_each_row_as_jax_expands_it(rows: str, fits: bool) -> None:
    source = graph(
        f"""g (float[3,2] x) => (float[3,2] y) <float two = {{2.0}}, float eps = {{0.00001}},
        float[3,2] s = {{{rows}}}> {{ {CORE} y = Mul(n, s) }}"""
    )
    (norm,) = units(source)
    assert (norm.blocked is None) is fits
    result, report = apply(FuseLayerNorm(), source)
    assert bool(report.changes) is fits
    feeds = {"x": np.array([[1, 2], [3, 5], [-4, 4]], np.float32)}
    assert np.allclose(run(source, feeds)[0], run(result, feeds)[0], rtol=1e-5, atol=1e-6)
