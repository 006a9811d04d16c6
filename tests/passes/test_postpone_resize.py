"""postpone-resize: Convs that move before the Resize, results that stay, and `fix` with a head of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from graphs import apply, ops, random_feeds
from hypothesis import given, settings
from hypothesis import strategies as st
from needs import needs_rtx
from onnx import TensorProto, helper, numpy_helper
from resized import LINEAR, SHAPED, TWICE, holds, model

from rewriter.jobs.fix import api
from rewriter.model import Model, load
from rewriter.passes.postpone_resize import PostponeResize
from rewriter.pipeline.presets import PRESETS

THREE = ["Conv", "Resize", "Conv", "Resize", "Conv", "Add", "Add"]
POSTPONED = [
    pytest.param(
        f"{{ p = {LINEAR}(b, , twice) q = {LINEAR}(c, , four) j = Concat<axis = 1>(a, p, q)"
        " y = Conv(j, w, bias) }",
        THREE,
        id="three levels by scales",
    ),
    pytest.param(
        f"{{ p = {LINEAR}(b, , , sb) q = {LINEAR}(c, , , sc) j = Concat<axis = -3>(q, p, a)"
        " y = Conv(j, w, bias) }",
        THREE,
        id="three levels by sizes",
    ),
    pytest.param(
        f"{{ o = {LINEAR}(a, , , sa) p = {LINEAR}(b, , , sb) q = {LINEAR}(c, , , sc)"
        " j = Concat<axis = 1>(o, p, q) y = Conv<kernel_shape = [1, 1]>(j, w) }",
        THREE,
        id="no bias; a Resize that changes nothing is passed over",
    ),
    pytest.param(
        '{ p = Resize<mode = "nearest", nearest_mode = "floor",'
        ' coordinate_transformation_mode = "asymmetric">(b, , twice) y = Conv(p, v, bias) }',
        ["Conv", "Resize"],
        id="no Concat",
    ),
    pytest.param(
        f"{{ p = {LINEAR}(b, , twice) j = Concat<axis = 1>(p, a) y = Conv(j, u, bias) }}",
        ["Conv", "Resize", "Conv", "Add"],
        id="two levels",
    ),
    pytest.param(
        f"{{ r = Relu(a) i = Neg(a) p = {LINEAR}(b, , twice) j = Concat<axis = 1>(r, p, i)"
        " y = Conv(j, wide, bias) }",
        ["Relu", "Neg", "Conv", "Resize", "Concat", "Conv", "Add"],
        id="parts that are not enlarged stay one Conv",
    ),
    pytest.param(
        f"{{ p = {LINEAR}(b, , twice) q = {LINEAR}(c, , four) j = Concat<axis = 1>(q, p)"
        " y = Conv(j, eleven, bias) }",
        ["Conv", "Resize", "Conv", "Resize", "Add"],
        id="all are enlarged: the largest has the bias",
    ),
    pytest.param(
        f"{{ p = {LINEAR}(b, , twice) r = Relu(p) q = {LINEAR}(c, , four) j = Concat<axis = 1>(a, r, q)"
        " y = Conv(j, w, bias) }",
        ["Resize", "Relu", "Conv", "Resize", "Concat", "Conv", "Add"],
        id="an activation after one of them",
    ),
    pytest.param(
        f"{{ p = {LINEAR}(b, , twice) m = Conv(p, v, bias) y = Conv(m, three, bias) }}",
        ["Conv", "Conv", "Resize"],
        id="two Convs in a row",
    ),
]
SIZES = "int64[4] sa = {1, 4, 8, 8}, int64[4] sb = {1, 6, 8, 8}, int64[4] sc = {1, 5, 8, 8}"
MORE = (
    "float[3,14,1,1] wide = {" + ", ".join(f"{0.3 * (i % 7) - 0.9:.2f}" for i in range(42)) + "}, "
    "float[3,11,1,1] eleven = {" + ", ".join(f"{0.3 * (i % 5) - 0.5:.2f}" for i in range(33)) + "}, "
    "float[3,3,1,1] three = {1, 2, 3, -1, 0.5, 0.25, 4, -3, 1}"
)


@pytest.mark.parametrize("opset", [11, 13, 17, 18, 19, 21])
@pytest.mark.parametrize(("body", "left"), POSTPONED)
def test_postponed(body: str, left: list[str], opset: int) -> None:
    body = body if opset >= 13 else body.replace(", , ,", ", none, none,").replace(", ,", ", none,")
    constants = f"{TWICE}, {SIZES}, {MORE}, float[0] none = {{}}"
    before = model(body, constants=constants, opset=opset)
    after, report = apply(PostponeResize(work=0), before)
    assert sorted(ops(after)) == sorted(left)
    assert report.changes
    assert not report.refusals
    holds(before, after)


def test_the_products_are_fewer_and_the_bias_is_added_once() -> None:
    levels = f"p = {LINEAR}(b, , twice) q = {LINEAR}(c, , four) j = Concat<axis = 1>(a, p, q)"
    body = f"{{ {levels} [mix] y = Conv(j, w, bias) }}"
    after, report = apply(PostponeResize(work=0), model(body))
    share = (4 + 6 / 4 + 5 / 16) / 15
    assert report.changes[0].what == f"moved before 2 Resizes, with {share:.2f} of the multiplications"
    convs = [node for node in after.proto.graph.node if node.op_type == "Conv"]
    assert [node.input[0] for node in convs] == ["b", "c", "a"]
    assert [len(node.input) for node in convs] == [2, 2, 3]
    assert all(node.name.startswith("mix/") for node in after.proto.graph.node)


def test_axes_without_the_channels_keep_sizes_as_they_are() -> None:
    body = '{ p = Resize<mode = "linear", axes = [2, 3]>(b, , , s) y = Conv(p, v, bias) }'
    before = model(body, "float[N,6,5,7] b", constants="int64[2] s = {8, 9}", opset=18)
    after, _ = apply(PostponeResize(work=0), before)
    assert ops(after) == ["Conv", "Resize"]
    assert after.proto.graph.node[1].input[3] == "s"
    holds(before, after)


def test_axes_with_the_channels() -> None:
    body = '{ p = Resize<mode = "linear", axes = [3, 1, 2]>(b, , , s) y = Conv(p, v, bias) }'
    before = model(body, "float[N,6,5,7] b", constants="int64[3] s = {9, 6, 8}", opset=18)
    after, _ = apply(PostponeResize(work=0), before)
    assert ops(after) == ["Conv", "Resize"]
    sizes = after.proto.graph.node[1].input[3]
    held = {t.name: numpy_helper.to_array(t).tolist() for t in after.proto.graph.initializer}
    assert held[sizes] == [9, 3, 8]
    holds(before, after)


def test_scales_tell_how_much_where_sizes_are_dynamic() -> None:
    body = f"{{ p = {LINEAR}(b, , twice) j = Concat<axis = 1>(a, p) y = Conv(j, u, bias) }}"
    before = model(body, "float[N,4,H,W] a, float[N,6,P,Q] b")
    after, report = apply(PostponeResize(work=0), before)
    assert ops(after) == ["Conv", "Resize", "Conv", "Add"]
    assert not report.refusals


@pytest.mark.parametrize("sizes", [(8, 8), (9, 11), (7, 5)])
def test_computed_sizes_of_a_known_shape_become_a_constant(sizes: tuple[int, int]) -> None:
    """As torch writes it: the batch and the channels from the tensor, height and width given."""
    constants = f"int64[2] s = {{{sizes[0]}, {sizes[1]}}}"
    before = model(SHAPED, "float[2,6,4,4] b", constants=constants)
    after, _ = apply(PostponeResize(work=0), before)
    assert ops(after) == ["Conv", "Resize"]
    holds(before, after)


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_a_model_in_lower_precision_keeps_its_type(dtype: int) -> None:
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    held = [
        numpy_helper.from_array(np.ones((2, 3, 1, 1)).astype(kind), "w"),
        numpy_helper.from_array(np.asarray([1, 1, 2, 2], np.float32), "s"),
    ]
    nodes = [helper.make_node("Resize", ["x", "", "s"], ["p"]), helper.make_node("Conv", ["p", "w"], ["y"])]
    ports = [
        helper.make_tensor_value_info(n, dtype, s) for n, s in (("x", [1, 3, 4, 4]), ("y", [1, 2, 8, 8]))
    ]
    made = helper.make_graph(nodes, "g", ports[:1], ports[1:], held)
    before = load(helper.make_model(made, opset_imports=[helper.make_opsetid("", 22)], ir_version=10))
    after, _ = apply(PostponeResize(work=0), before)
    assert ops(after) == ["Conv", "Resize"]
    assert {t.name: t.data_type for t in after.proto.graph.initializer}["w/part"] == dtype


MODES: list[dict[str, Any]] = [
    {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
    {"mode": "nearest", "coordinate_transformation_mode": "half_pixel", "nearest_mode": "round_prefer_ceil"},
    {"mode": "linear", "coordinate_transformation_mode": "half_pixel"},
    {"mode": "linear", "coordinate_transformation_mode": "align_corners"},
    {"mode": "linear", "coordinate_transformation_mode": "pytorch_half_pixel"},
    {"mode": "linear", "coordinate_transformation_mode": "asymmetric"},
    {"mode": "cubic", "coordinate_transformation_mode": "half_pixel"},
    {"mode": "cubic", "coordinate_transformation_mode": "half_pixel", "exclude_outside": 1},
]


@st.composite
def heads(draw: st.DrawFn) -> Model:
    """One to four levels, enlarged or not, by sizes or scales, and a pointwise Conv of their Concat."""
    size, batch = (draw(st.integers(4, 12)), draw(st.integers(4, 12))), draw(st.integers(1, 2))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    out, levels = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    rows: int | str = batch if draw(st.booleans()) else "N"
    nodes, held, ports, joined, depth = [], [], [], [], 0
    for level in range(levels):
        read = draw(st.integers(1, 6))
        depth += read
        by_sizes, enlarged = isinstance(rows, int) and draw(st.booleans()), level == 0 or draw(st.booleans())
        small = tuple(draw(st.integers(2, s)) for s in size) if by_sizes and enlarged else size
        if enlarged and not by_sizes:  # powers of two: onnx and ONNX Runtime round other scales differently
            small = tuple(s // k if s % k == 0 else s for s, k in zip(size, (2, 4), strict=True))
        ports.append(helper.make_tensor_value_info(f"x{level}", TensorProto.FLOAT, [rows, read, *small]))
        joined.append(f"r{level}" if enlarged else f"x{level}")
        if not enlarged:
            continue
        if by_sizes:
            value, inputs = np.asarray([batch, read, *size], np.int64), ["", "", f"s{level}"]
        else:
            scales = [s / t for s, t in zip(size, small, strict=True)]
            value, inputs = np.asarray([1, 1, *scales], np.float32), ["", f"s{level}"]
        held.append(numpy_helper.from_array(value, f"s{level}"))
        mode = draw(st.sampled_from(MODES))
        nodes.append(helper.make_node("Resize", [f"x{level}", *inputs], [f"r{level}"], **mode))
    source = joined[0]
    if levels > 1:
        source = "j"
        nodes.append(helper.make_node("Concat", joined, [source], axis=1))
    constants = {"w": rng.standard_normal((out, depth, 1, 1)), "b": rng.standard_normal(out)}
    inputs = [source, "w", "b"] if draw(st.booleans()) else [source, "w"]
    held += [numpy_helper.from_array(v.astype(np.float32), n) for n, v in constants.items() if n in inputs]
    nodes.append(helper.make_node("Conv", inputs, ["y"]))
    made = helper.make_graph(
        nodes, "g", ports, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)], held
    )
    opset = draw(st.sampled_from([13, 17, 18, 21]))
    whole = helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return load(onnx.shape_inference.infer_shapes(whole))


def _multiplications(source: Model) -> int:
    """Of all Convs, for a batch of 1."""
    shapes = {
        v.name: [d.dim_value for d in v.type.tensor_type.shape.dim]
        for g in [onnx.shape_inference.infer_shapes(source.whole()).graph]
        for v in (*g.value_info, *g.output)
    }
    weights = {t.name: np.prod(t.dims) for t in source.proto.graph.initializer}
    convs = [node for node in source.proto.graph.node if node.op_type == "Conv"]
    return int(sum(weights[node.input[1]] * np.prod(shapes[node.output[0]][2:]) for node in convs))


@settings(max_examples=200, deadline=None)
@given(heads())
def test_any_head_keeps_its_results_and_saves_work(before: Model) -> None:
    after, report = apply(PostponeResize(work=0), before)
    if not report.changes:
        assert after is before
        return
    assert _multiplications(after) < _multiplications(before)
    holds(before, after)


LEVELS = {"a": (4, 16), "b": (6, 8), "c": (5, 4), "d": (8, 2)}


def _head(batch: str = "1") -> Model:
    """Four levels as torch exports SegFormer's head: sizes computed, coarse ones first, then Relu."""
    parts = [
        f"n{x} = Shape({x}) h{x} = Slice(n{x}, zero, two) s{x} = Concat<axis = 0>(h{x}, size)"
        f" r{x} = {LINEAR}({x}, , , s{x})"
        for x in LEVELS
    ]
    inputs = ", ".join(f"float[{batch},{c},{s},{s}] {x}" for x, (c, s) in LEVELS.items())
    rng = np.random.default_rng(3)
    weights = {"w": rng.standard_normal((4, 23, 1, 1)), "bias": rng.standard_normal(4)}
    body = f"""<ir_version: 8, opset_import: ["" : 16]> g ({inputs}) => (float[{batch},4,16,16] y)
        <int64[2] size = {{16, 16}}, int64[1] zero = {{0}}, int64[1] two = {{2}}> {{
            {" ".join(parts)}
            j = Concat<axis = 1>(rd, rc, rb, ra)
            [mix] m = Conv<kernel_shape = [1, 1]>(j, w, bias)
            y = Relu(m)
        }}"""
    source = onnx.parser.parse_model(body)
    source.graph.initializer.extend(
        numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()
    )
    return load(source)


FP16_PRESETS = ["trt-fp16", "accurate"]


@pytest.mark.parametrize("preset", FP16_PRESETS)
def test_presets_for_fp16_have_it_before_ranges_are_measured(preset: str) -> None:
    names = PRESETS[preset].pipeline.split(",")
    assert names.index("postpone-resize") < next(i for i, n in enumerate(names) if n.startswith("rescale"))


def _fixed(**options: Any) -> Any:
    """The preset, with each Conv moved: the head is small."""
    before = _head()
    passes = PRESETS["trt-fp16"].pipeline.replace("postpone-resize", "postpone-resize{work=0}")
    feeds = [random_feeds(before, seed) for seed in range(3)]
    return api.fix(before.whole(), inputs=feeds, passes=passes, **options)


def test_fix_shortens_the_head() -> None:
    result = _fixed(build=False)
    assert result.verdict.passed
    left = ops(load(result.proto))
    assert (left.count("Conv"), left.count("Resize"), "Concat" in left) == (4, 3, False)
    convs = [node for node in result.proto.graph.node if node.op_type == "Conv"]
    types = {t.name: t.data_type for t in result.proto.graph.initializer}
    assert {types[node.input[1]] for node in convs} == {TensorProto.FLOAT16}


def test_a_plan_fits_the_shortened_head_again(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    first = _fixed(verify=False, save_plan=plan)
    assert _fixed(verify=False, plan=plan).proto.SerializeToString() == first.proto.SerializeToString()


def test_a_kept_conv_stays_by_the_saved_plan_too(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    first = _fixed(verify=False, save_plan=plan, keep_fp32=["mix"])
    assert ops(load(first.proto)).count("Conv") == 1
    assert _fixed(verify=False, plan=plan).proto.SerializeToString() == first.proto.SerializeToString()


def _levels(size: str, out: int = 256) -> Model:
    """A fine level of 256 channels, and one of 512 that is enlarged twice."""
    source = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[1,256,{size},{size}] a, float[1,512,C,C] b, float[{out},768,1,1] w) => (float[1,{out},P,Q] y)
        <float[4] twice = {{1, 1, 2, 2}}> {{
            p = {LINEAR}(b, , twice)  j = Concat<axis = 1>(a, p)  y = Conv(j, w) }}"""
    )
    if size.isdigit():
        for axis in source.graph.input[1].type.tensor_type.shape.dim[2:]:
            axis.dim_value = int(size) // 2
    del source.graph.input[2]
    source.graph.initializer.append(numpy_helper.from_array(np.ones((out, 768, 1, 1), np.float32), "w"))
    return load(onnx.shape_inference.infer_shapes(source))


@pytest.mark.parametrize(
    ("size", "work", "moves"),
    [
        pytest.param("128", 1443, True, id="3,221 MFLOP for a Conv and an Add"),
        pytest.param("64", 1443, False, id="805 MFLOP"),
        pytest.param("64", 402, True, id="a smaller bound"),
        pytest.param("64", 403, False, id="a bound just above it"),
        pytest.param("S", 1443, False, id="unknown sizes count as 64"),
        pytest.param("S", 402, True, id="unknown sizes and a smaller bound"),
    ],
)
def test_a_conv_moves_where_that_saves_more_than_its_kernels_cost(size: str, work: int, moves: bool) -> None:
    assert PostponeResize().work == 1443
    before = _levels(size)
    after, report = apply(PostponeResize(work=work), before)
    assert (after is not before) == moves
    assert [("do not pay for 2 kernels more" in r.reason) for r in report.refusals] == [True] * (not moves)


def test_a_conv_that_needs_no_kernel_more_moves_however_small() -> None:
    body = f"{{ p = {LINEAR}(b, , twice) y = Conv(p, v, bias) }}"
    assert apply(PostponeResize(), model(body))[1].changes


@needs_rtx
def test_tensorrt_builds_the_shortened_head() -> None:
    result = _fixed()
    build = next(check for check in result.verdict.checks if check.name == "build")
    assert build.passed
    assert "types as planned" in build.summary
