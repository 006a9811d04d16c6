"""clean-casts: Casts that are removed, Casts that stay, and values that never change."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from graphs import apply, graph, ops, random_feeds, run
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from rewriter.model import Array, Model, load
from rewriter.passes.clean_casts import CleanCasts, embeds

F32, F16, BF16, F64 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE
I8, I32, I64, BOOL = TensorProto.INT8, TensorProto.INT32, TensorProto.INT64, TensorProto.BOOL

CLEANED = [
    pytest.param(
        "g (float[4] x) => (float[4] y) { a = Cast<to = 1>(x) y = Relu(a) }",
        ["Relu"],
        id="a Cast to the same type",
    ),
    pytest.param(
        "g (float[4] x) => (float[4] y) { a = Relu(x) y = Cast<to = 1>(a) }",
        ["Relu"],
        id="a no-op Cast that writes a graph output, whose name stays",
    ),
    pytest.param(
        "g (float[4] x) => (float[4] y, float[4] z) { a = Relu(x) y = Cast<to = 1>(a) z = Neg(a) }",
        ["Relu", "Neg"],
        id="a no-op Cast on an output, of a tensor with other consumers",
    ),
    pytest.param(
        "g (float[4] x) => (float[2] y, float[2] z) { a, b = Split(x) y = Cast<to = 1>(b) z = Neg(a) }",
        ["Split", "Neg"],
        id="a no-op Cast of one output of several",
    ),
    pytest.param(
        "g (float[4] x) => (float[4] y) {"
        " a = Cast<to = 1>(x) b = Cast<to = 1>(a) c = Cast<to = 1>(b) y = Neg(c) }",
        ["Neg"],
        id="three no-op Casts in a row, in one run",
    ),
    pytest.param(
        "g (float16[4] x) => (float[4] y) { a = Cast<to = 1>(x) b = Cast<to = 10>(a) y = Cast<to = 1>(b) }",
        ["Cast"],
        id="f16-f32-f16-f32 is one Cast",
    ),
    pytest.param(
        "g (float[4] x) => (float[4] y) { a = Cast<to = 11>(x) b = Cast<to = 1>(a) y = Neg(b) }",
        ["Neg"],
        id="the round trip f32-f64-f32",
    ),
    pytest.param(
        "g (float[4] x) => (float[4] y) {"
        " h = Cast<to = 16>(x) a = Cast<to = 1>(h) b = Cast<to = 16>(a) y = Cast<to = 1>(b) }",
        ["Cast", "Cast"],
        id="the round trip bf16-f32-bf16 inside a rounding detour",
    ),
    pytest.param(
        "g (float16[4] x) => (double[4] y) { a = Cast<to = 1>(x) y = Cast<to = 11>(a) }",
        ["Cast"],
        id="widening in two steps is widening in one",
    ),
    pytest.param(
        "g (int32[4] x) => (float[4] y) { a = Cast<to = 7>(x) y = Cast<to = 1>(a) }",
        ["Cast"],
        id="int32-int64-float rounds once either way",
    ),
    pytest.param(
        "g (bool[4] x) => (float[4] y) { a = Cast<to = 9>(x) b = Cast<to = 7>(a) y = Cast<to = 1>(b) }",
        ["Cast"],
        id="bool-bool-int64-float",
    ),
    pytest.param(
        "g (float[4] x) => (float16[1] y) <float half = {0.5}> {"
        " s = ReduceSum<keepdims = 1>(x) a = Cast<to = 11>(s) b = Cast<to = 10>(a)"
        " y = Pow(b, half) }",
        ["ReduceSum", "Cast", "Pow"],
        id="the chain ReduceSum, Cast, Cast, Pow",
    ),
    pytest.param(
        "g (float[4] x) => (float16[4] y) { a = Cast<to = 10>(x) b = Cast<to = 10>(x) y = Add(a, b) }",
        ["Cast", "Add"],
        id="two Casts of one tensor to one type",
    ),
    pytest.param(
        "g (float[4] x) => (float16[4] y, float16[4] z) {"
        " a = Cast<to = 10>(x) y = Cast<to = 10>(x) z = Neg(a) }",
        ["Cast", "Neg"],
        id="of two equal Casts the one that writes an output stays",
    ),
    pytest.param(
        "g (float[4] x) => (float16[4] y, float16[4] z) {"
        " a = Cast<to = 10>(x) b = Cast<to = 1>(a) c = Cast<to = 10>(b) y = Neg(c) z = Cast<to = 10>(x) }",
        ["Cast", "Neg"],
        id="a duplicate that only shows once a round trip is gone",
    ),
    pytest.param(
        "g (float[2] x) => (float16[2] y) <float[2] w = {1.5, -2.5}> {"
        " h = Cast<to = 10>(x) a = Cast<to = 10>(w) y = Mul(h, a) }",
        ["Cast", "Mul"],
        id="the Cast of an initializer",
    ),
    pytest.param(
        "g (float[2] x) => (float[2] y) {"
        " i = Constant<value_ints = [3, 4]>() a = Cast<to = 1>(i) y = Mul(x, a) }",
        ["Mul"],
        id="the Cast of a Constant node",
    ),
]


@pytest.mark.parametrize(("text", "left"), CLEANED)
def test_cleaned(text: str, left: list[str]) -> None:
    before = graph(text)
    after, report = apply(CleanCasts(), before)
    assert ops(after) == left
    assert report.changes
    assert not report.refusals or "Cast" in left
    _same_values(before, after)
    again, second = apply(CleanCasts(), after)
    assert not second.changes
    assert again.same_as(after)


STAYING = [
    pytest.param(
        "g (float[4] x) => (float[4] y) { a = Cast<to = 10>(x) b = Cast<to = 1>(a) y = Neg(b) }",
        "float-float16-float rounds on the way",
        id="f32-f16-f32 rounds",
    ),
    pytest.param(
        "g (float[4] x) => (float[4] y) { a = Cast<to = 16>(x) b = Cast<to = 1>(a) y = Neg(b) }",
        "float-bfloat16-float rounds on the way",
        id="f32-bf16-f32 rounds",
    ),
    pytest.param(
        "g (float[4] x) => (float[4] y) { a = Cast<to = 7>(x) b = Cast<to = 1>(a) y = Neg(b) }",
        "truncates to integers",
        id="float-int64-float truncates",
    ),
    pytest.param(
        "g (int64[4] x) => (int64[4] y) { a = Cast<to = 1>(x) b = Cast<to = 7>(a) y = Neg(b) }",
        "int64-float-int64 rounds on the way",
        id="int64-float-int64 loses integers above 2^24",
    ),
    pytest.param(
        "g (float[4] x) => (float[4] y) { y = Cast<to = 1>(x) }",
        "is an output, and so is x, or an input",
        id="a no-op Cast from a graph input to a graph output",
    ),
    pytest.param(
        "g (float[4] x) => (float[4] y, float[4] z) { y = Neg(x) z = Cast<to = 1>(y) }",
        "is an output, and so is y",
        id="a no-op Cast from one output to another",
    ),
    pytest.param(
        "g (float[4] x) => (float16[4] y, float16[4] z) { y = Cast<to = 10>(x) z = Cast<to = 10>(x) }",
        "are both outputs",
        id="two equal Casts that both write outputs",
    ),
    pytest.param(
        "g (float[2] x) => (float[2] z, float16[2] y) <float[2] w = {1.5, -2.5}> {"
        " z = Add(x, w) y = Cast<to = 10>(w) }",
        "a constant cannot take its place",
        id="the Cast of a constant to an output",
    ),
    pytest.param(
        "g (int32[2] x) => (int32[2] y) <float[2] w = {1e20, 1.0}> { a = Cast<to = 6>(w) y = Add(x, a) }",
        "do not fit int32",
        id="a constant too large for the integer type",
    ),
    pytest.param(
        "g (int32[2] x) => (int32[2] y) <float[2] w = {2147483648.0, 1.0}>"
        " { a = Cast<to = 6>(w) y = Add(x, a) }",
        "do not fit int32",
        id="2^31, the first that int32 does not have",
    ),
    pytest.param(
        "g (uint8[2] x) => (uint8[2] y) <float[2] w = {-1.0, 1.0}> { a = Cast<to = 2>(w) y = Max(x, a) }",
        "do not fit uint8",
        id="a negative constant without a sign",
    ),
]


@pytest.mark.parametrize(("text", "reason"), STAYING)
def test_casts_that_stay(text: str, reason: str) -> None:
    before = graph(text)
    after, report = apply(CleanCasts(), before)
    assert after is before
    assert [r for r in report.refusals if reason in r.reason]


SILENT = [
    pytest.param(
        "g (double[4] x) => (float16[4] y) { a = Cast<to = 1>(x) y = Cast<to = 10>(a) }",
        id="f64-f32-f16 rounds twice",
    ),
    pytest.param(
        "g (float16[4] x) => (int64[4] y) { a = Cast<to = 1>(x) y = Cast<to = 7>(a) }",
        id="f16-f32-int64 may overflow",
    ),
    pytest.param(
        "g (float[4] x) => (float[4] y, float16[4] z) { y = Neg(x) z = Cast<to = 10>(x) }",
        id="one Cast that is needed",
    ),
]


@pytest.mark.parametrize("text", SILENT)
def test_nothing_to_say(text: str) -> None:
    before = graph(text)
    after, report = apply(CleanCasts(), before)
    assert after is before
    assert not report.refusals


DETOURS = [
    pytest.param(STAYING[0].values[0], ["Neg"], id="f32-f16-f32"),
    pytest.param(STAYING[1].values[0], ["Neg"], id="f32-bf16-f32"),
    pytest.param(STAYING[3].values[0], ["Neg"], id="int64-f32-int64"),
    pytest.param(STAYING[2].values[0], ["Cast", "Cast", "Neg"], id="float-int64-float is still arithmetic"),
    pytest.param(
        "g (float[4] x) => (double[4] y) { a = Cast<to = 10>(x) y = Cast<to = 11>(a) }",
        ["Cast"],
        id="f32-f16-f64",
    ),
]


@pytest.mark.parametrize(("text", "left"), DETOURS)
def test_drop_rounding_removes_detours(text: str, left: list[str]) -> None:
    after, _ = apply(CleanCasts(drop_rounding=True), graph(text))
    assert ops(after) == left


def test_the_cast_of_opset_1_is_skipped() -> None:
    before = graph('g (float[4] x) => (float[4] y) { a = Cast<to = "FLOAT">(x) y = Relu(a) }', opset=5)
    assert apply(CleanCasts(), before)[0] is before


def test_a_folded_constant_keeps_sign_infinity_and_ties() -> None:
    values = np.array([-1e-9, 1e-9, -0.0, 1e6, -1e6, 2049.0, 2051.0, 5.96e-8], np.float32)
    before = _with_weight(values)
    after, _ = apply(CleanCasts(), before)
    assert ops(after) == ["Identity"]
    (folded,) = run(after, {})
    (wanted,) = run(before, {})
    np.testing.assert_array_equal(folded.view(np.uint16), wanted.view(np.uint16))
    assert np.signbit(folded[:3]).tolist() == [True, False, True]


def test_a_large_weight_is_converted_and_the_old_one_is_dropped() -> None:
    before = _with_weight(np.linspace(-3, 3, 4096, dtype=np.float32))
    after, _ = apply(CleanCasts(), before)
    assert [a.dtype for a in after.weights.values()] == [np.float16]
    assert after.weights.keys().isdisjoint(before.weights)


def _with_weight(values: Array) -> Model:
    proto = graph(
        "g () => (float16[n] y) { c = Cast<to = 10>(w) y = Identity(c) }".replace(
            "{ c", f"<float[{values.size}] w = {{{', '.join(['0.0'] * values.size)}}}> {{ c"
        )
    ).whole()
    proto.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(values, "w"))
    return load(proto)


def test_subgraphs_are_cleaned_and_outer_tensors_kept() -> None:
    before = graph(
        """
        g (float[4] x, bool c) => (float[4] y) {
            o = Cast<to = 1>(x)
            y = If (c) <
                then_branch = t () => (float[4] u) { a = Relu(o) u = Cast<to = 1>(a) },
                else_branch = e () => (float[4] v) { v = Cast<to = 1>(o) }
            >
        }"""
    )
    after, report = apply(CleanCasts(), before)
    assert ops(after) == ["If"]
    then_branch, else_branch = (a.g for a in after.proto.graph.node[0].attribute)
    assert [n.op_type for n in then_branch.node] == ["Relu"]
    assert then_branch.node[0].output[0] == "u"
    assert [n.op_type for n in else_branch.node] == ["Cast"]
    assert any("v is an output" in r.reason for r in report.refusals)
    for condition in (True, False):
        feeds = {"x": np.array([-1, 2, -3, 4], np.float32), "c": np.array(condition)}
        np.testing.assert_array_equal(run(before, feeds)[0], run(after, feeds)[0])


def test_a_constant_of_the_outer_graph_is_not_copied_into_a_branch() -> None:
    before = graph(
        """
        g (float16[2] x, bool c) => (float16[2] y) <float[2] w = {1.5, 2.5}> {
            y = If (c) <
                then_branch = t () => (float16[2] u) { a = Cast<to = 10>(w) u = Add(x, a) },
                else_branch = e () => (float16[2] v) { v = Identity(x) }
            >
        }"""
    )
    after, _ = apply(CleanCasts(), before)
    assert after is before


WIDER = [
    (F16, F32),
    (BF16, F32),
    (F32, F64),
    (I8, F16),
    (I8, BF16),
    (I32, F64),
    (I32, I64),
    (BOOL, I8),
    (BOOL, F16),
]
NOT_WIDER = [
    (F16, BF16),
    (BF16, F16),
    (I32, F32),
    (I64, F64),
    (F16, I64),
    (I8, TensorProto.UINT8),
    (TensorProto.UINT8, I8),
]


@pytest.mark.parametrize(("narrow", "wide"), [(t, t) for t in (F16, BF16, I64)] + WIDER)
def test_embeds(narrow: int, wide: int) -> None:
    assert embeds(narrow, wide)


@pytest.mark.parametrize(("narrow", "wide"), NOT_WIDER + [(b, a) for a, b in WIDER])
def test_does_not_embed(narrow: int, wide: int) -> None:
    assert not embeds(narrow, wide)


TYPES = st.sampled_from([F16, F32, F64, BF16, I8, I32, I64, BOOL])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from([F16, F32, F64, I8, I32, I64, BOOL]), st.lists(TYPES, min_size=1, max_size=6))
def test_no_chain_of_casts_changes_a_value(start: int, chain: list[int]) -> None:
    before = _chain(start, chain)
    after, _ = apply(CleanCasts(), before)
    _, second = apply(CleanCasts(), after)
    assert not second.changes
    assert ops(after).count("Cast") <= len(chain) + 1
    # within int8, so that no conversion is undefined; with fractions and ties where the type has them
    values = np.array([0, 1, -1, 2, 100, -128, 0.5, 1 / 3, -2.7, 1 + 2**-11, 1 + 2**-9, 1e-7])
    feeds = {"x": values.astype(helper.tensor_dtype_to_np_dtype(start))}
    for a, b in zip(run(before, feeds), run(after, feeds), strict=True):
        np.testing.assert_array_equal(a, b)


def _chain(start: int, chain: list[int]) -> Model:
    """x, cast on and on, the last tensor made float64 so that NumPy can compare it."""
    names = ["x", *(f"t{i}" for i in range(len(chain)))]
    nodes = [
        helper.make_node("Cast", [a], [b], to=to) for a, b, to in zip(names, names[1:], chain, strict=False)
    ]
    nodes += [helper.make_node("Cast", [names[-1]], ["d"], to=F64), helper.make_node("Neg", ["d"], ["y"])]
    ports = [helper.make_tensor_value_info(n, t, [12]) for n, t in (("x", start), ("y", F64))]
    made = helper.make_graph(nodes, "g", ports[:1], ports[1:])
    return load(helper.make_model(made, ir_version=8, opset_imports=[helper.make_opsetid("", 17)]))


def _same_values(before: Model, after: Model) -> None:
    feeds = random_feeds(before, scale=1000.0)
    for a, b in zip(run(before, feeds), run(after, feeds), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
