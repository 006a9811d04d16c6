"""drop-double: float32 wherever it suffices, float64 where shapes and borders need it."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import apply, graph, model, ops, random_feeds, run
from onnx import TensorProto

from rewriter.model import Model, facts
from rewriter.passes.drop_double import DropDouble


def doubles(source: Model) -> set[str]:
    """Names of the float64 tensors of all graphs."""
    known = facts.infer(source)
    return {n for scope in known.scopes for n, tensor in scope.items() if tensor.dtype == TensorProto.DOUBLE}


@pytest.mark.parametrize(
    ("body", "expected", "left"),
    [
        pytest.param(
            """g (float[2,3] x) => (float[2,3] y) <double half = {0.5}> {
                d = Cast<to = 11>(x) m = Mul(d, half) y = Cast<to = 1>(m) }""",
            ["Mul", "Cast"],
            set(),
            id="an initializer between two Casts",
        ),
        pytest.param(
            """g (float[2,3] x) => (float[2,3] y) {
                h = Constant<value = double {0.5}>() i = Identity(h)
                d = Cast<to = 11>(x) m = Mul(d, i) a = Add(m, h) y = Cast<to = 1>(a) }""",
            ["Identity", "Mul", "Add", "Cast"],
            set(),
            id="Constant nodes, one after an Identity",
        ),
        pytest.param(
            """g (float[4] x) => (float[4] y) <int64[1] n = {4}> {
                z = ConstantOfShape<value = double[1] {2.5}>(n) s = Sin(z)
                f = Cast<to = 1>(s) y = Add(x, f) }""",
            ["ConstantOfShape", "Sin", "Cast", "Add"],
            set(),
            id="ConstantOfShape",
        ),
        pytest.param(
            """g (float[3,3] x) => (float[3,3] y) {
                e = EyeLike<dtype = 11>(x) n = Neg(e) f = Cast<to = 1>(n) y = Add(x, f) }""",
            ["EyeLike", "Neg", "Cast", "Add"],
            set(),
            id="EyeLike",
        ),
        pytest.param(
            """g (int64[4] p) => (float[4] y) <double step = {0.125}> {
                d = Cast<to = 11>(p) m = Mul(d, step) s = Sin(m) y = Cast<to = 1>(s) }""",
            ["Cast", "Mul", "Sin", "Cast"],
            set(),
            id="positions, cast from integers",
        ),
        pytest.param(
            """g (double[2,3] x) => (double[2,3] y) <double half = {0.5}> { m = Mul(x, half) y = Sin(m) }""",
            ["Cast", "Mul", "Sin", "Cast"],
            {"x", "y"},
            id="inputs and outputs keep their type",
        ),
        pytest.param(
            """g (double[2,3] x) => (double[2,3] m, double[2,3] y) { m = Neg(x) y = Sin(m) }""",
            ["Cast", "Neg", "Sin", "Cast", "Cast"],
            {"x", "m", "y"},
            id="an output that another node reads",
        ),
        pytest.param(
            "g (double[2,3] x, double[2,3] z) => (bool[2,3] y) { y = Less(x, z) }",
            ["Cast", "Cast", "Less"],
            {"x", "z"},
            id="a comparison, whose output is no float",
        ),
        pytest.param(
            """g (float[2,3] x) => (float[2,3] y) <double like = {0.5}> {
                d = CastLike(x, like) s = Sin(d) y = CastLike(s, x) }""",
            ["CastLike", "Sin", "CastLike"],
            set(),
            id="CastLike",
        ),
        pytest.param(
            """g (float[2,3] x, bool c) => (float[2,3] y) <double half = {0.5}> {
                d = Cast<to = 11>(x) m = Mul(d, half)
                i = If(c) <then_branch = t () => (double[2,3] o) { o = Sin(m) },
                           else_branch = e () => (double[2,3] p) { p = Mul(m, half) }>
                n = Neg(i) y = Cast<to = 1>(n) }""",
            ["Mul", "Cast", "If", "Cast", "Neg", "Cast"],
            {"m/float64", "i", "o", "p"},
            id="the border of an If stays",
        ),
    ],
)
def test_dropped_and_close(body: str, expected: list[str], left: set[str]) -> None:
    source = graph(body)
    result, report = apply(DropDouble(), source)
    assert {change.node for change in report.changes} <= {source.proto.graph.name, "t", "e"}
    assert report.changes
    assert not report.refusals
    assert sorted(ops(result)) == sorted(expected)
    assert doubles(result) == left
    assert result.signature == source.signature
    feeds = random_feeds(source)
    for ours, theirs in zip(run(result, feeds), run(source, feeds), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)
    again, second = apply(DropDouble(), result)
    assert not second.changes
    assert again.same_as(result)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("g (float[2] x) => (float[2] y) { y = Relu(x) }", id="no float64"),
        pytest.param(
            """g (float[N,3] x) => (int64[M] y) <double two = {2.0}, int64 at = {0}> {
                s = Shape(x) n = Gather(s, at) d = Cast<to = 11>(n) h = Div(d, two) f = Floor(h)
                i = Cast<to = 7>(f) z = Constant<value_int = 0>() o = Constant<value_int = 1>()
                y = Range(z, i, o) }""",
            id="a size that is halved in float64",
        ),
        pytest.param(
            """g (float[1,1,4,4] x, int64[4] n) => (float[1,1,H,W] y) <double[4] two = {2, 2, 2, 2}> {
                d = Cast<to = 11>(n) q = Div(d, two) s = Cast<to = 1>(q) i = Identity(s)
                y = Resize(x, "", i) }""",
            id="the scales of a Resize",
        ),
        pytest.param(
            """g (float[1,1,4,4] x, int64[8] n) => (float[1,1,H,W] y)
            <double[8] two = {2, 2, 2, 2, 2, 2, 2, 2}, float[4] one = {1, 1, 1, 1}> {
                d = Cast<to = 11>(n) q = Div(d, two) roi = Cast<to = 1>(q)
                y = Resize<coordinate_transformation_mode = "tf_crop_and_resize">(x, roi, one) }""",
            id="the region of a Resize",
        ),
        pytest.param(
            """g (double a, double b) => (float[N] y) <double one = {0.1}> {
                r = Range(a, b, one) y = Cast<to = 1>(r) }""",
            id="the bounds of a Range",
        ),
        pytest.param("g (double[2] x) => (float[2] y) { y = Cast<to = 1>(x) }", id="a border that is there"),
        pytest.param("g (float[2] x) => (double[2] y) { y = Cast<to = 11>(x) }", id="a border at an output"),
        pytest.param("g (double[2] x) => (double[2] y) { y = MyPlugin(x) }", id="a plugin"),
        pytest.param(
            "g (double[2] x, float[1] like) => (float[2] y) { y = CastLike(x, like) }",
            id="a border by CastLike",
        ),
        pytest.param("g (double[2,3] x) => (int64[2] y) { y = Shape(x) }", id="the shape of a float64 input"),
    ],
)
def test_unchanged_to_the_byte(body: str) -> None:
    source = graph(body)
    result, report = apply(DropDouble(), source)
    assert result.same_as(source)
    assert not report.changes
    assert not report.refusals


def test_index_arithmetic_stays_beside_converted_tensors() -> None:
    source = graph(
        """g (float[N,3] x) => (float[M] y) <double third = {0.3333333333333333}, int64 at = {0}> {
            s = Shape(x) n = Gather(s, at) d = Cast<to = 11>(n) p = Mul(d, third) c = Ceil(p)
            i = Cast<to = 7>(c) z = Constant<value_int = 0>() o = Constant<value_int = 1>()
            r = Range(z, i, o) e = Cast<to = 11>(r) q = Mul(e, third) w = Add(q, p) y = Cast<to = 1>(w) }"""
    )
    result, report = apply(DropDouble(), source)
    assert report.changes
    kept = {n.op_type for n in result.proto.graph.node for o in n.output if o in doubles(result)}
    assert kept == {"Cast", "Mul", "Ceil"}
    assert {"q", "w"}.isdisjoint(doubles(result))
    for rows in (1, 3, 7, 3000):
        feeds = {"x": np.zeros((rows, 3), np.float32)}
        np.testing.assert_allclose(run(result, feeds)[0], run(source, feeds)[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        pytest.param("1e300", "beyond float32", id="too large"),
        pytest.param("-1.7976931348623157e308", "beyond float32", id="the lowest float64, as in masks"),
        pytest.param("1e-200", "0 in float32", id="too small"),
        pytest.param("16777217", "its integer 16777217", id="an integer above 2^24"),
    ],
)
def test_a_constant_that_does_not_fit_is_declined(value: str, reason: str) -> None:
    source = graph(
        f"""g (float[2] x) => (float[2] y) <double k = {{{value}}}> {{
            d = Cast<to = 11>(x) n = Neg(d) [odd] m = Min(n, k) s = Sin(m) y = Cast<to = 1>(s) }}"""
    )
    result, report = apply(DropDouble(), source)
    (refusal,) = report.refusals
    assert refusal.node == "k"
    assert reason in refusal.reason
    assert "odd stays" in refusal.reason
    assert {"k", "m", "s"} <= doubles(result)
    assert "n" not in doubles(result)
    feeds = random_feeds(source)
    np.testing.assert_allclose(run(result, feeds)[0], run(source, feeds)[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "value", [pytest.param("16777216", id="2^24"), pytest.param("0.1", id="a fraction that is rounded")]
)
def test_constants_that_fit(value: str) -> None:
    source = graph(
        f"""g (float[2] x) => (float[2] y) <double k = {{{value}}}> {{
            d = Cast<to = 11>(x) m = Mul(d, k) y = Cast<to = 1>(m) }}"""
    )
    result, report = apply(DropDouble(), source)
    assert not report.refusals
    assert not doubles(result)


def test_large_weights_are_halved() -> None:
    source = graph(
        """g (float[2,30] x, double[30,40] w) => (float[2,40] y) {
            d = Cast<to = 11>(x) m = MatMul(d, w) y = Cast<to = 1>(m) }"""
    )
    del source.proto.graph.input[1]
    weight = np.random.default_rng(0).standard_normal((30, 40))
    source.proto.graph.initializer.append(source.detached_tensor("w", weight))
    result, _ = apply(DropDouble(), source)
    assert [a.dtype for a in result.weights.values()] == [np.float32]
    feeds = random_feeds(source)
    np.testing.assert_allclose(run(result, feeds)[0], run(source, feeds)[0], rtol=1e-5, atol=1e-5)


def test_value_info_tells_the_new_type() -> None:
    source = model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[2] x) => (float[2] y) <double k = {2.0}, double[2] m> {
            d = Cast<to = 11>(x) m = Mul(d, k) y = Cast<to = 1>(m) }"""
    )
    result, _ = apply(DropDouble(), source)
    assert {v.name: v.type.tensor_type.elem_type for v in result.proto.graph.value_info} == {"m": 1}
