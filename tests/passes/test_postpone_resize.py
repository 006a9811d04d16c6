"""postpone-resize: Convs that move before the Resize, and results that stay."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from graphs import apply, keeps_results, model_of, ops, weighted
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from rewriter.ir.model import Array, Model, load
from rewriter.passes.postpone_resize import PostponeResize

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


LINEAR = 'Resize<mode = "linear">'

SHAPED = f"""g (float[N,6,4,4] b) => (y) <int64[2] s = {{8, 8}}> {{
    n = Shape(b) zero = Constant<value_ints = [0]>() two = Constant<value_ints = [2]>()
    head = Slice(n, zero, two) sizes = Concat<axis = 0>(head, s) p = {LINEAR}(b, , , sizes)
    y = Conv(p, v, bias)
}}"""


def test_sizes_with_a_symbolic_batch_are_declined() -> None:
    source = weighted(SHAPED, v=(3, 6, 1, 1), bias=(3,)).whole()
    before = onnx.shape_inference.infer_shapes(source, data_prop=True)
    shape = next(v for v in before.graph.value_info if v.name == "p").type.tensor_type.shape
    shape.dim[0].dim_param = "N"
    after, report = apply(PostponeResize(work=0), load(before))
    assert ops(after)[-1] == "Conv"
    assert ["an unknown batch" in refusal.reason for refusal in report.refusals] == [True]


@st.composite
def heads(draw: st.DrawFn) -> Model:
    """One to four levels, enlarged or not, by sizes or scales, and a pointwise Conv of their Concat."""
    size, batch = (draw(st.integers(4, 12)), draw(st.integers(4, 12))), draw(st.integers(1, 2))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    out, levels = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    rows: int | str = batch if draw(st.booleans()) else "N"
    nodes, held, joined, depth = [], dict[str, Array](), [], 0
    ports = dict[str, Sequence[int | str]]()
    for level in range(levels):
        read = draw(st.integers(1, 6))
        depth += read
        by_sizes, enlarged = isinstance(rows, int) and draw(st.booleans()), level == 0 or draw(st.booleans())
        small = tuple(draw(st.integers(2, s)) for s in size) if by_sizes and enlarged else size
        if enlarged and not by_sizes:  # powers of two: onnx and ONNX Runtime round other scales differently
            small = tuple(s // k if s % k == 0 else s for s, k in zip(size, (2, 4), strict=True))
        ports[f"x{level}"] = [rows, read, *small]
        joined.append(f"r{level}" if enlarged else f"x{level}")
        if not enlarged:
            continue
        if by_sizes:
            held[f"s{level}"], inputs = np.asarray([batch, read, *size], np.int64), ["", "", f"s{level}"]
        else:
            scales = [s / t for s, t in zip(size, small, strict=True)]
            held[f"s{level}"], inputs = np.asarray([1, 1, *scales]), ["", f"s{level}"]
        mode = draw(st.sampled_from(MODES))
        nodes.append(helper.make_node("Resize", [f"x{level}", *inputs], [f"r{level}"], **mode))
    source = joined[0]
    if levels > 1:
        source = "j"
        nodes.append(helper.make_node("Concat", joined, [source], axis=1))
    constants: dict[str, Array] = {"w": rng.standard_normal((out, depth, 1, 1))}
    if draw(st.booleans()):
        constants["b"] = rng.standard_normal(out)
    nodes.append(helper.make_node("Conv", [source, *constants], ["y"]))
    return model_of(nodes, ports, "y", held | constants, opset=draw(st.sampled_from([13, 17, 18, 21])))


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


@given(heads())
def test_any_head_keeps_its_results_and_saves_work(before: Model) -> None:
    after, report = apply(PostponeResize(work=0), before)
    if not report.changes:
        assert after is before
        return
    assert _multiplications(after) < _multiplications(before)
    keeps_results(before, after, PostponeResize(work=0))


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
