"""clamp-constants: masks that become finite in FP16, masks that stay, and results that do not change."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from graphs import apply, graph, ops, run
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from rewriter.graph import GraphEditor
from rewriter.model import Array, Model, load
from rewriter.passes.clamp_constants import MASK, ClampConstants
from rewriter.patterns.masks import FP16_MAX

FLT_MAX = float(np.finfo(np.float32).max)
CAUSAL = ", ".join("-1e12" if column > row else "0.0" for row in range(4) for column in range(4))


def _attention(body: str, outputs: str = "float[2,4,4] p", opset: int = 17) -> Model:
    return graph(f"g (float[2,4,4] s, int64[2,1,4] m, bool[2,1,4] b) => ({outputs}) {body}", opset=opset)


def _feeds(seed: int = 0, scale: float = 10.0) -> dict[str, Array]:
    """Scores, and masks that leave the first two of four keys open."""
    rng = np.random.default_rng(seed)
    scores = (rng.standard_normal((2, 4, 4)) * scale).astype(np.float32)
    mask = np.broadcast_to(np.array([1, 1, 0, 0], np.int64), (2, 1, 4))
    return {"s": scores, "m": mask.copy(), "b": mask.astype(bool)}


def _constants(source: Model) -> list[float]:
    """Every value of every float constant."""
    editor = GraphEditor(source, source.proto.graph, {})
    names = [name for node in editor.nodes for name in node.input if name]
    arrays = [a for a in map(editor.constant, names) if a is not None and a.dtype.kind == "f"]
    return [float(v) for a in arrays for v in a.reshape(-1)]


CLAMPED = [
    pytest.param(
        "<float v = {-3.4028235e38}> { x = Where(b, s, v) p = Softmax(x) }", id="Where chooses FLT_MAX"
    ),
    pytest.param(
        "<float v = {-3.4028235e38}> { n = Not(b) x = Where(n, v, s) p = Softmax(x) }",
        id="Where the other way round",
    ),
    pytest.param(
        "<float v = {-1e9}, float z = {0.0}> { w = Where(b, z, v) x = Add(s, w) p = Softmax(x) }",
        id="an additive mask out of two constants",
    ),
    pytest.param(
        "<float o = {1.0}, float v = {-3.4028235e38}> {"
        " f = Cast<to = 1>(m) n = Sub(o, f) w = Mul(n, v) x = Add(w, s) p = Softmax(x) }",
        id="(1 - mask) * FLT_MAX",
    ),
    pytest.param(
        "<float o = {1.0}, float v = {1e12}> {"
        " f = Cast<to = 1>(b) n = Sub(f, o) w = Mul(v, n) x = Add(w, s) p = Softmax(x) }",
        id="(mask - 1) * 1e12, where the constant is positive",
    ),
    pytest.param(
        "<float o = {1.0}, float v = {1e9}> {"
        " f = Cast<to = 1>(b) n = Sub(o, f) w = Mul(n, v) x = Sub(s, w) p = Softmax(x) }",
        id="a mask that is subtracted",
    ),
    pytest.param(
        "<float v = {-65504.0}> { x = Where(b, s, v) p = Softmax(x) }",
        id="FP16's own lowest number, which bears no sum",
    ),
    pytest.param(
        f"<float[4,4] v = {{{CAUSAL}}}> {{ x = Add(s, v) p = Softmax(x) }}",
        id="a causal mask in one constant",
    ),
    pytest.param(
        f"<float[4,4] v = {{{CAUSAL}}}, int64[1] a = {{0}}, int64[3] e = {{2, 4, 4}}> {{"
        " u = Unsqueeze(v, a) w = Expand(u, e) i = Identity(w) c = Cast<to = 1>(i)"
        " x = Add(s, c) p = Softmax(x) }",
        id="a mask through Unsqueeze, Expand, Identity and a no-op Cast",
    ),
    pytest.param(
        f"<float[4,4] v = {{{CAUSAL}}}, int64[1] z = {{0}}, int64[1] n = {{4}}, int64[3] e = {{1, 4, 4}}> {{"
        " t = Slice(v, z, n, z) r = Reshape(t, e) x = Add(s, r) p = Softmax(x) }",
        id="a mask through Slice and Reshape",
    ),
    pytest.param(
        "<float[2,1,2] v = {-1e9, -1e9, -1e9, -1e9}, float[2,1,2] z = {0.0, 0.0, 0.0, 0.0}> {"
        " w = Concat<axis = 2>(z, v) x = Add(s, w) p = Softmax(x) }",
        id="a mask put together by Concat",
    ),
    pytest.param(
        "{ i = Constant<value_ints = [2, 1, 4]>() v = ConstantOfShape<value = float[1] {-1e30}>(i)"
        " o = Constant<value_float = 1.0>() f = Cast<to = 1>(b) n = Sub(o, f) w = Mul(v, n) x = Add(s, w)"
        " p = Softmax(x) }",
        id="ConstantOfShape times a mask",
    ),
    pytest.param(
        "<float v = {-1e9}, float z = {0.0}, float d = {-3.4028235e38}> {"
        " w = Where(b, z, v) x = Add(s, w) y = Max(x, d) p = Softmax(y) }",
        id="a lower bound of FLT_MAX before Softmax is no obstacle",
    ),
    pytest.param(
        f"<float v = {{-1e9}}, float z = {{0.0}}, float[4,4] c = {{{CAUSAL}}}> {{"
        " w = Where(b, z, v) k = Add(w, c) x = Add(s, k) p = Softmax(x) }",
        id="two masks that are added up",
    ),
    pytest.param(
        "<float v = {-1e9}, float z = {0.0}> {"
        " w = Where(b, z, v) h = Shape(w) x = Add(s, w) p = Softmax(x) }",
        id="Shape does not read the values",
    ),
]


@pytest.mark.parametrize("body", CLAMPED)
def test_clamped(body: str) -> None:
    before = _attention(body)
    after, report = apply(ClampConstants(), before)
    assert report.changes
    assert not report.refusals
    read_in_fp16 = [v for v in _constants(after) if v != -FLT_MAX]  # a lower bound may stay
    assert max(map(abs, read_in_fp16)) <= MASK < FP16_MAX
    assert ops(after) == ops(before)
    np.testing.assert_array_equal(run(before, _feeds())[0], run(after, _feeds())[0])
    again, _ = apply(ClampConstants(), after)
    assert again is after


DECLINED = [
    pytest.param(
        "<float v = {-1e9}, float z = {0.0}> { w = Where(b, z, v) x = Add(s, w) p = Relu(x) }",
        "reaches",
        id="no Softmax",
    ),
    pytest.param(
        "<float v = {-1e9}> { x = Where(b, s, v) p = LogSoftmax(x) }",
        "reaches LogSoftmax",
        id="LogSoftmax shows the mask's own value",
    ),
    pytest.param(
        "<float v = {-1e9}> { x = Add(s, v) p = Softmax(x) }",
        "whole rows",
        id="a constant added to every entry",
    ),
    pytest.param(
        "<float[4,1] v = {0.0, 0.0, -1e9, 0.0}> { x = Add(s, v) p = Softmax(x) }",
        "whole rows",
        id="a constant that masks queries",
    ),
    pytest.param(
        "<float[2,4] v = {0.0, 0.0, 0.0, 0.0, -1e9, -1e9, -1e9, -1e9}, int64[1] a = {1}> {"
        " w = Unsqueeze(v, a) x = Add(s, w) p = Softmax(x) }",
        "whole rows",
        id="a constant with a row that is masked as a whole",
    ),
    pytest.param(
        "<float v = {-1e9}, float z = {0.0}, int64[3] e = {2, 4, 1}> {"
        " w = Where(b, z, v) r = Reshape(w, e) x = Add(s, r) p = Softmax(x) }",
        "whole rows",
        id="a computed mask of queries",
    ),
    pytest.param(
        "<float o = {1.0}, float v = {-1e9}> {"
        " f = Sigmoid(s) n = Sub(o, f) w = Mul(n, v) x = Add(w, s) p = Softmax(x) }",
        "may hold other values than 0 and 1",
        id="a soft mask",
    ),
    pytest.param(
        "<float o = {3.0}, float v = {-1e9}> {"
        " f = Cast<to = 1>(m) n = Sub(o, f) w = Mul(n, v) x = Add(w, s) p = Softmax(x) }",
        "may lie in 2 to 3",
        id="a factor other than 0 and 1",
    ),
    pytest.param(
        "<float v = {1e9}> { f = Cast<to = 1>(m) w = Mul(f, v) x = Add(w, s) p = Softmax(x) }",
        "is positive",
        id="a boost of the open entries absorbs their scores",
    ),
    pytest.param(
        "<float v = {3.4028235e38}> { x = Where(b, s, v) p = Softmax(x) }",
        "is positive",
        id="positive FLT_MAX",
    ),
    pytest.param(
        "<float[4] v = {-1e9, 1e9, 0.0, 0.0}> { x = Add(s, v) p = Softmax(x) }", "both signs", id="both signs"
    ),
    pytest.param(
        "<float[4] v = {-1e9, -1e4, 0.0, 0.0}> { x = Add(s, v) p = Softmax(x) }",
        "other values in it exceed 4096",
        id="a second level of masking in one constant",
    ),
    pytest.param(
        "<float v = {-1e9}> { x = Where(b, s, v) n = Neg(x) q = Softmax(x) p = Add(n, q) }",
        "reaches Neg",
        id="masked scores with another consumer",
    ),
    pytest.param(
        "<float v = {-1e9}, float h = {0.5}> { x = Where(b, s, v) y = Mul(x, h) p = Softmax(y) }",
        "may hold other values",
        id="a scale after the mask",
    ),
    pytest.param(
        "<float v = {-3.4028235e38}> {"
        " x = Where(b, s, v) h = Cast<to = 10>(x) q = Softmax(h) p = Cast<to = 1>(q) }",
        "narrows its type",
        id="a Cast to FP16 that makes infinity of it",
    ),
]


@pytest.mark.parametrize(("body", "reason"), DECLINED)
def test_declined(body: str, reason: str) -> None:
    before = _attention(body)
    after, report = apply(ClampConstants(), before)
    assert after is before
    assert [reason in r.reason for r in report.refusals] == [True], report.refusals


INFINITE = [
    pytest.param("{ x = Where(b, s, v) p = Softmax(x) }", "", id="Where with -inf"),
    pytest.param(
        "{ x = Where(b, s, v) w = Softmax(x) n = IsNaN(w) p = Where(n, z, w) }",
        "IsNaN",
        id="a guard against NaN",
    ),
    pytest.param(
        "{ f = Cast<to = 1>(m) n = Sub(o, f) w = Mul(n, v) x = Add(w, s) p = Softmax(x) }",
        "0 * inf",
        id="0 * inf",
    ),
]


@pytest.mark.parametrize(("body", "reason"), INFINITE)
def test_infinity(body: str, reason: str) -> None:
    before = _with_infinity(body)
    after, report = apply(ClampConstants(), before)
    if reason:
        assert after is before
        assert reason in report.refusals[0].reason
    else:
        assert "relies on no row being masked as a whole" in report.changes[0].what
        np.testing.assert_array_equal(run(before, _feeds())[0], run(after, _feeds())[0])


def test_a_guard_against_nan_is_no_obstacle_where_no_row_is_masked_as_a_whole() -> None:
    body = "{ x = Add(s, c) w = Softmax(x) n = IsNaN(w) p = Where(n, z, w) }"
    causal = np.where(np.tri(4) > 0, 0.0, -np.inf).astype(np.float32)
    before = _with_infinity(body, causal)
    after, report = apply(ClampConstants(), before)
    assert report.changes
    np.testing.assert_array_equal(run(before, _feeds())[0], run(after, _feeds())[0])


def _with_infinity(body: str, causal: Array | None = None) -> Model:
    source = _attention(
        f"<float v = {{-1e9}}, float z = {{0.0}}, float o = {{1.0}}, float[4,4] c = {{{CAUSAL}}}> {body}"
    )
    infinite = {"v": np.array(-np.inf, np.float32)} | ({} if causal is None else {"c": causal})
    for tensor in source.proto.graph.initializer:
        if tensor.name in infinite:
            tensor.CopyFrom(onnx.numpy_helper.from_array(infinite[tensor.name], tensor.name))
    return source


def test_a_mask_that_is_an_output_is_declined() -> None:
    before = _attention(
        "<float v = {-1e9}, float z = {0.0}> { w = Where(b, z, v) x = Add(s, w) p = Softmax(x) }",
        "float[2,4,4] p, float[2,1,4] w",
    )
    after, report = apply(ClampConstants(), before)
    assert after is before
    assert "leaves the graph as w" in report.refusals[0].reason


def test_of_a_shared_constant_only_the_attention_use_changes() -> None:
    before = _attention(
        "<float v = {-1e9}> { x = Where(b, s, v) p = Softmax(x) n = Add(s, v) }",
        "float[2,4,4] p, float[2,4,4] n",
    )
    after, report = apply(ClampConstants(), before)
    assert len(report.changes) == len(report.refusals) == 1
    assert {-1e9, -MASK} <= set(_constants(after))
    for a, b in zip(run(before, _feeds()), run(after, _feeds()), strict=True):
        np.testing.assert_array_equal(a, b)


WHOLE = [
    pytest.param("{ x = Where(b, s, v) p = Softmax(x) }", False, id="Where keeps such a row uniform"),
    pytest.param("{ w = Where(b, z, v) x = Add(s, w) p = Softmax(x) }", True, id="Add does not"),
]


JOINED = [
    pytest.param("{ k = Not(b) x = Where(b, s, v) y = Where(k, x, w) p = Softmax(y) }", id="of unlike depth"),
    pytest.param("{ x = Add(s, c) y = Where(b, x, v) p = Softmax(y) }", id="one added, one chosen"),
    pytest.param("{ z = Where(b, o, v) u = Add(z, c) x = Add(s, u) p = Softmax(x) }", id="added up"),
]


@pytest.mark.parametrize("body", JOINED)
def test_two_masks_may_mask_a_whole_row_between_them(body: str) -> None:
    constants = f"float v = {{-1e9}}, float w = {{-1e30}}, float o = {{0.0}}, float[4,4] c = {{{CAUSAL}}}"
    before = _attention(f"<{constants}> {body}")
    _, report = apply(ClampConstants(), before)
    assert len(report.changes) == 2
    assert all("relies on no row being masked as a whole" in c.what for c in report.changes)
    assert apply(ClampConstants(whole_rows="decline"), before)[0] is before


LOW_TYPES = [
    pytest.param(TensorProto.FLOAT16, -65504.0, id="FP16"),
    pytest.param(TensorProto.BFLOAT16, -3.3e38, id="BF16"),
    pytest.param(TensorProto.DOUBLE, -1e300, id="FP64"),
]


@pytest.mark.parametrize(("dtype", "value"), LOW_TYPES)
def test_constants_of_other_types(dtype: int, value: float) -> None:
    after, report = apply(ClampConstants(), _masked(dtype, value))
    assert report.changes
    clamped = next(t for t in after.proto.graph.initializer if "clamped" in t.name)
    assert clamped.data_type == dtype
    assert float(after.array(clamped)) == -MASK


def _masked(dtype: int, value: float) -> Model:
    """s + (1 - m) * value, then Softmax, in one element type."""
    nodes = [
        helper.make_node("Cast", ["m"], ["f"], to=dtype),
        helper.make_node("Sub", ["o", "f"], ["n"]),
        helper.make_node("Mul", ["n", "v"], ["w"]),
        helper.make_node("Add", ["s", "w"], ["x"]),
        helper.make_node("Softmax", ["x"], ["p"]),
    ]
    ports = {"s": (dtype, [2, 4, 4]), "m": (TensorProto.INT64, [2, 1, 4]), "p": (dtype, [2, 4, 4])}
    values = [helper.make_tensor_value_info(name, *port) for name, port in ports.items()]
    of_type = helper.tensor_dtype_to_np_dtype(dtype)
    constants = [numpy_helper.from_array(np.array(x, of_type), n) for n, x in (("v", value), ("o", 1))]
    made = helper.make_graph(nodes, "g", values[:2], values[2:], constants)
    return load(helper.make_model(made, ir_version=8, opset_imports=[helper.make_opsetid("", 17)]))


@pytest.mark.parametrize(("body", "relies"), WHOLE)
def test_rows_that_are_masked_as_a_whole(body: str, relies: bool) -> None:
    before = _attention(f"<float v = {{-3.4028235e38}}, float z = {{0.0}}> {body}")
    after, report = apply(ClampConstants(), before)
    assert ("relies on no row being masked as a whole" in report.changes[0].what) is relies
    feeds = _feeds() | {"b": np.zeros((2, 1, 4), bool)}
    uniform = np.full((2, 4, 4), 0.25, np.float32)
    np.testing.assert_array_equal(run(before, feeds)[0], uniform)
    assert np.array_equal(run(after, feeds)[0], uniform) is not relies
    declined, report = apply(ClampConstants(whole_rows="decline"), before)
    assert (declined is before) is relies
    assert ("may be masked as a whole" in report.refusals[0].reason) if relies else not report.refusals


def test_a_constant_mask_needs_no_reliance() -> None:
    before = _attention(f"<float[4,4] v = {{{CAUSAL}}}> {{ x = Add(s, v) p = Softmax(x) }}")
    after, _ = apply(ClampConstants(whole_rows="decline"), before)
    assert -MASK in _constants(after)
    columns = _attention(f"<float[4,4] v = {{{CAUSAL}}}> {{ x = Add(s, v) p = Softmax<axis = 1>(x) }}")
    assert apply(ClampConstants(whole_rows="decline"), columns)[0] is columns


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.sampled_from([-FLT_MAX, -1e12, -1e9, -65504.0]),
    st.floats(0.0, 8000.0, width=32),
    st.integers(0, 2**32 - 1),
)
def test_no_score_within_the_stated_range_shows_the_difference(value: float, reach: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.uniform(-reach, reach, (2, 4, 4)).astype(np.float32)
    open_ = rng.random((2, 1, 4)) < 0.5
    open_[..., rng.integers(4)] = True
    for body in (
        "{ x = Where(b, s, v) p = Softmax(x) }",
        "{ w = Where(b, z, v) x = Add(s, w) p = Softmax(x) }",
    ):
        before = _attention(f"<float v = {{{value:.9g}}}, float z = {{0.0}}> {body}")
        after, _ = apply(ClampConstants(), before)
        feeds = {"s": scores, "b": open_, "m": open_.astype(np.int64)}
        np.testing.assert_array_equal(run(before, feeds)[0], run(after, feeds)[0])


def test_in_fp16_the_mask_makes_nan_before_and_none_after() -> None:
    before = graph(ClampConstants.before)
    after, _ = apply(ClampConstants(), before)
    with np.errstate(all="ignore"):
        assert np.isnan(_in_fp16(before)).all()
    probabilities = _in_fp16(after)
    assert probabilities[2:].tolist() == [0.0, 0.0]
    assert probabilities.sum() == pytest.approx(1, abs=2**-10)


def _in_fp16(source: Model) -> Array:
    """The mask arithmetic of `ClampConstants.before` on four keys, two of them open, in FP16."""
    lowest = np.float16(min(_constants(source)))
    scores = np.array([1, 2, 3, 4], np.float16)
    masked = scores + (np.float16(1) - np.array([1, 1, 0, 0], np.float16)) * lowest
    shifted: Array = np.exp((masked - masked.max()).astype(np.float32))
    return np.asarray(shifted / shifted.sum())


def test_a_mask_in_a_branch_may_come_from_outside() -> None:
    before = graph(
        """
        g (float[2,4,4] s, bool[2,1,4] b, bool c) => (float[2,4,4] y) <float v = {-1e9}> {
            y = If (c) <
                then_branch = t () => (float[2,4,4] p) { x = Where(b, s, v) p = Softmax(x) },
                else_branch = e () => (float[2,4,4] q) { q = Where(b, s, v) }
            >
        }"""
    )
    after, report = apply(ClampConstants(), before)
    assert len(report.changes) == len(report.refusals) == 1
    feeds = {name: value for name, value in _feeds().items() if name != "m"}
    for condition in (True, False):
        both = feeds | {"c": np.array(condition)}
        np.testing.assert_array_equal(run(before, both)[0], run(after, both)[0])
