"""Types of tensors: where Casts are, what is unchanged, and that the result is always a valid model."""

from __future__ import annotations

from collections.abc import Callable

import graphs
import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import NodeProto, TensorProto, helper, numpy_helper

from rewriter.ir.errors import PassError
from rewriter.ir.graph.casts import TypeRequest, retype
from rewriter.ir.model import Array, Model, facts, load, walk_graphs
from rewriter.ir.model.schemas import logical_name
from rewriter.runtime.emulation import emulation, reference

FP32, FP16, BF16 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16


def typed(
    source: Model,
    kept: str = "",
    *,
    low: int = FP16,
    inputs: dict[str, int] | None = None,
    outputs: dict[str, int] | None = None,
) -> Model:
    """`source` in `low`, except the nodes whose operator or result is named in `kept`."""
    names = set(kept.split())

    def node_type(_scope: int, node: NodeProto) -> int:
        return FP32 if names & {node.op_type, *map(logical_name, node.output)} else low

    request = TypeRequest(node_type, inputs or {}, outputs or {})
    result = retype(source, facts.infer(source), request)
    onnx.checker.check_model(result.whole(), full_check=True)
    facts.infer(result, strict=True)
    again = retype(result, facts.infer(result), request)
    if outputs and {p.name: p.dtype for p in source.signature.outputs} != outputs:
        # an output that gets the type of a rounding lets the next run share its Cast
        result, again = again, retype(again, facts.infer(again), request)
    assert again.same_as(result), "a second run changes nothing"
    return result


def dtype(source: Model, tensor: str, scope: int = 0) -> int:
    return facts.infer(source).scopes[scope][tensor].dtype


def casts(source: Model) -> list[tuple[str, str]]:
    """(input, output) of every Cast in all graphs."""
    nodes = [n for g in walk_graphs(source.proto.graph) for n in g.node]
    return [(n.input[0], n.output[0]) for n in nodes if n.op_type == "Cast"]


def writer(source: Model, tensor: str) -> NodeProto:
    nodes: list[NodeProto] = [n for g in walk_graphs(source.proto.graph) for n in g.node]
    return next(n for n in nodes if tensor in n.output)


def same_in_fp32(given_model: Model, result: Model, feeds: dict[str, Array]) -> None:
    """With every type back at FP32, the result is bit-equal to the given model."""
    expected = graphs.run(given_model, feeds)
    back = reference(result, facts.infer(result))
    types = {p.name: helper.tensor_dtype_to_np_dtype(p.dtype) for p in back.signature.inputs}
    actual = graphs.run(back, {n: a.astype(types[n]) for n, a in feeds.items()})
    for a, b in zip(expected, actual, strict=True):
        np.testing.assert_array_equal(a, b)


CHAIN = """
    g (float[2,3] x) => (float[2,3] y) {
        a = Neg(x)
        b = Exp(a)
        c = Abs(b)
        y = Relu(c)
    }"""


ROUND_TRIP = "a = Neg(x) h = Cast<to = 10>(a) f = Cast<to = 1>(h) y = Exp(f)"
QUANTIZED = "<float s = {0.125}, int8 z = {0}> { q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }"
HALF = "g (float16[2] x) => (float16[2] y) { a = Exp(x) y = Neg(a) }"
ENDS = [("x", "x/fp16"), ("y/fp16", "y")]

CASTS = [
    pytest.param(
        "g (float[2] x) => (float[2] y, float[2] z)"
        " { a = Neg(x) b = Exp(a) c = Abs(a) y = Add(a, b) z = Add(a, c) }",
        "Exp Abs Add",
        17,
        [("x", "x/fp16"), ("a", "a/fp32")],
        id="one Cast serves all consumers",
    ),
    pytest.param(HALF, "a", 17, [("x", "x/fp32"), ("a", "a/fp16")], id="an island in a pure FP16 model"),
    pytest.param(
        f"g (float[2] x) => (float[2] y) {{ {ROUND_TRIP} }}",
        "",
        17,
        ENDS,
        id="a round trip of an FP16 tensor goes",
    ),
    pytest.param(
        "g (float[2] x) => (float16[2] y) { y = Cast<to = 10>(x) }",
        "",
        17,
        [("x", "y")],
        id="an input cast straight to an output",
    ),
    pytest.param(
        f"g (float[2] x) => (float[2] y) {QUANTIZED}", "", 17, [], id="quantized data below opset 19"
    ),
    pytest.param(
        f"g (float[2] x) => (float[2] y) {QUANTIZED}", "", 19, ENDS, id="quantized data from opset 19 on"
    ),
    pytest.param(
        "g (float[4] x) => (float[4] y) { a = Neg(x) o = Optional(a) e = OptionalGetElement(o) y = Exp(e) }",
        "",
        18,
        [("x", "x/fp16"), ("a", "a/fp32"), ("e", "e/fp16"), ("y/fp16", "y")],
        id="optionals keep their types",
    ),
]


@pytest.mark.parametrize(("text", "kept", "opset", "expected"), CASTS)
def test_casts_are_where_types_change(
    text: str, kept: str, opset: int, expected: list[tuple[str, str]]
) -> None:
    assert casts(typed(graphs.graph(text, opset=opset, ir=9), kept)) == expected


class TestIslands:
    @pytest.mark.parametrize(
        ("kept", "expected"),
        [
            pytest.param("", [("x", "x/fp16"), ("y/fp16", "y")], id="no island: Casts at input and output"),
            pytest.param(
                "b", [("x", "x/fp16"), ("a", "a/fp32"), ("b", "b/fp16"), ("y/fp16", "y")], id="one node"
            ),
            pytest.param(
                "b c",
                [("x", "x/fp16"), ("a", "a/fp32"), ("c", "c/fp16"), ("y/fp16", "y")],
                id="two nodes, one border",
            ),
            pytest.param("a b c y", [], id="everything kept: no Cast"),
            pytest.param("a", [("a", "a/fp16"), ("y/fp16", "y")], id="an island at an FP32 input"),
            pytest.param("y", [("x", "x/fp16"), ("c", "c/fp32")], id="an island at an FP32 output"),
        ],
    )
    def test_casts_are_only_on_the_border(self, kept: str, expected: list[tuple[str, str]]) -> None:
        assert casts(typed(graphs.graph(CHAIN), kept)) == expected

    def test_a_consumer_in_fp32_reads_the_cast_that_writes_the_output(self) -> None:
        source = graphs.graph("""
            g (float[2] x) => (float[2] y, float[2] z) {
                y = Neg(x)
                z = Exp(y)
            }""")
        result = typed(source, "z")
        assert casts(result) == [("x", "x/fp16"), ("y/fp16", "y")]
        assert list(writer(result, "z").input) == ["y"]

    def test_new_nodes_carry_the_tag(self) -> None:
        source = graphs.graph(CHAIN)
        result = retype(source, facts.infer(source), TypeRequest(lambda *_: FP16, tag="mixed-precision"))
        tags = [[p.value for p in n.metadata_props] for n in result.proto.graph.node if n.op_type == "Cast"]
        assert tags == [["mixed-precision"]] * 2

    def test_the_given_model_is_unchanged(self) -> None:
        source = graphs.graph(CHAIN)
        before = source.copy()
        typed(source)
        assert source.same_as(before)

    def test_islands_in_bf16(self) -> None:
        result = typed(graphs.graph(CHAIN, opset=22, ir=10), "b", low=BF16)
        assert [dtype(result, t) for t in "abc"] == [BF16, FP32, BF16]


class TestGivenTypes:
    def test_a_pure_fp16_model_needs_no_cast(self) -> None:
        source = graphs.graph(HALF)
        assert typed(source).same_as(source)

    def test_existing_casts_are_removed(self) -> None:
        source = graphs.graph("""
            g (float[2] x) => (float[2] y) {
                h = Cast<to = 10>(x)
                a = Neg(h)
                f = Cast<to = 1>(a)
                b = Exp(f)
                k = Cast<to = 10>(b)
                c = Abs(k)
                y = Cast<to = 1>(c)
            }""")
        assert [n.op_type for n in typed(source, "a b c").proto.graph.node] == ["Neg", "Exp", "Abs", "Cast"]
        assert casts(typed(source)) == [("x", "x/fp16"), ("c", "y")]

    def test_a_rounding_round_trip_stays(self) -> None:
        source = graphs.graph(f"g (float[2] x) => (float[2] y) {{ {ROUND_TRIP} }}")
        kept = typed(source, "a y")
        assert casts(kept) == [("a", "a/fp16"), ("a/fp16", "a/fp16/fp32")]
        feeds = {"x": np.asarray([1e-9, 0.1], np.float32)}
        np.testing.assert_array_equal(graphs.run(source, feeds)[0], graphs.run(kept, feeds)[0])

    def test_an_fp16_consumer_inside_a_round_trip_reads_the_lowered_tensor(self) -> None:
        source = graphs.graph("""
            g (float[2] x) => (float[2] y, float16[2] z) {
                a = Neg(x)
                h = Cast<to = 10>(a)
                f = Cast<to = 1>(h)
                y = Exp(f)
                z = Abs(h)
            }""")
        result = typed(source, "a y")
        assert list(writer(result, "z").input) == ["a/fp16"]
        same_in_fp32(source, source, {"x": np.asarray([0.1, 0.3], np.float32)})

    def test_double_tensors_are_unchanged(self) -> None:
        source = graphs.graph("""
            g (double[2] x, float[2] v) => (double[2] y, float[2] w) {
                y = Exp(x)
                d = Cast<to = 11>(v)
                e = Sqrt(d)
                w = Cast<to = 1>(e)
            }""")
        result = typed(source)
        assert [dtype(result, t) for t in ("y", "d", "e")] == [TensorProto.DOUBLE] * 3
        same_in_fp32(source, result, {"x": np.ones(2), "v": np.asarray([4.0, 9.0], np.float32)})

    def test_integer_and_shape_arithmetic_is_unchanged(self) -> None:
        source = graphs.graph("""
            g (float[2,6] x) => (float[4,3] y, int64[1] n)
            <int64[1] two = {2}, int64[1] k = {3}, int64[1] i = {0}> {
                s = Shape(x)
                m = Gather(s, i)
                n = Mul(m, two)
                t = Concat<axis = 0>(n, k)
                y = Reshape(x, t)
            }""")
        result = typed(source)
        assert casts(result) == [("x", "x/fp16"), ("y/fp16", "y")]
        assert [list(n.input) for n in result.proto.graph.node if n.op_type == "Shape"] == [["x"]]


class TestConstants:
    MATMUL = "g (float[2,3] x) => (float[2,3] y) <float[3,3] w> { y = MatMul(x, w) }"

    def weighted(self, value: Array) -> Model:
        source = graphs.graph(self.MATMUL.replace("<float[3,3] w>", "<float[3,3] w = {1,2,3,4,5,6,7,8,9}>"))
        source.proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(value, "w"))
        return load(source.proto)

    def test_an_initializer_is_converted_in_place(self) -> None:
        result = typed(self.weighted(np.eye(3, dtype=np.float32)))
        assert [(t.name, t.data_type) for t in result.proto.graph.initializer] == [("w", FP16)]

    def test_a_large_initializer_is_converted_outside_the_graph(self) -> None:
        text = "g (float[2,64] x) => (float[2,64] y) <float[64,64] w> { y = MatMul(x, w) }"
        proto = onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 17]>' + text)
        weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(weight, "w"))
        result = typed(load(proto))
        assert result.weights["w"].dtype == np.float16
        np.testing.assert_array_equal(result.weights["w"], weight.astype(np.float16))

    def test_an_initializer_with_fp32_and_fp16_consumers_is_duplicated(self) -> None:
        source = graphs.graph("""
            g (float[2] x) => (float[2] y, float[2] z) <float[2] w = {0.1, 0.2}> {
                y = Add(x, w)
                z = Mul(x, w)
            }""")
        result = typed(source, "y")
        types = {t.name: t.data_type for t in result.proto.graph.initializer}
        assert types == {"w": FP32, "w/fp16": FP16}

    def test_a_constant_node_with_fp32_and_fp16_consumers(self) -> None:
        source = graphs.graph("""
            g (float[2] x) => (float[2] y, float[2] z) {
                w = Constant<value = float[2] {0.1, 0.2}>()
                y = Add(x, w)
                z = Mul(x, w)
            }""")
        result = typed(source, "y")
        assert list(writer(result, "y").input) == ["x", "w"]
        assert list(writer(result, "z/fp16").input) == ["x/fp16", "w/fp16"]

    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            pytest.param(-1e-9, -0.0, id="a tiny negative value becomes -0.0"),
            pytest.param(1e-9, 0.0, id="a tiny positive value becomes 0.0"),
            pytest.param(1e-7, 2**-24 * 2, id="a subnormal is rounded to nearest"),
            pytest.param(65519.0, 65504.0, id="a value that rounds to the largest number fits"),
            pytest.param(-np.inf, -np.inf, id="an infinity stays infinite"),
        ],
    )
    def test_values_are_rounded_with_their_sign(self, value: float, expected: float) -> None:
        result = typed(self.weighted(np.full((3, 3), value, np.float32)))
        got = numpy_helper.to_array(result.proto.graph.initializer[0])
        np.testing.assert_array_equal(got, np.full((3, 3), expected, np.float16))
        assert np.all(np.signbit(got) == np.signbit(np.float32(expected)))

    @pytest.mark.parametrize(
        ("value", "low"),
        [
            pytest.param(65520.0, FP16, id="FP16 beyond 65519"),
            pytest.param(np.finfo(np.float32).min, FP16, id="FP16 of -FLT_MAX"),
            pytest.param(np.finfo(np.float32).max, BF16, id="BF16 of FLT_MAX"),
        ],
    )
    def test_a_value_that_would_become_infinite_is_an_error(self, value: float, low: int) -> None:
        source = self.weighted(np.full((3, 3), value, np.float32))
        source.proto.opset_import[0].version = 22
        with pytest.raises(PassError, match=r"(?s)w: the constant holds values up to.*keep"):
            typed(source, low=low)

    def test_constant_of_shape(self) -> None:
        source = graphs.graph("""
            g (int64[1] n, float[k] x) => (float[k] y, float[k] z) {
                a = ConstantOfShape(n)
                b = ConstantOfShape<value = float[1] {0.5}>(n)
                y = Add(x, a)
                z = Add(x, b)
            }""")
        result = typed(source, "z b")
        assert [dtype(result, t) for t in "ab"] == [FP16, FP32]
        same_in_fp32(source, result, {"n": np.asarray([2]), "x": np.ones(2, np.float32)})

    @pytest.mark.parametrize(
        "attribute", ["value_float = 0.5", "value_floats = [0.5, 2.0]", "value = float[2] {0.5, 2.0}"]
    )
    def test_every_form_of_constant_node(self, attribute: str) -> None:
        source = graphs.graph(
            f"g (float[2] x) => (float[2] y) {{ w = Constant<{attribute}>()\n y = Add(x, w) }}"
        )
        same_in_fp32(source, typed(source), {"x": np.ones(2, np.float32)})

    def test_an_initializer_that_is_listed_as_input(self) -> None:
        text = "g (float[2] x, float[2] w, float[2] unread) => (float[2] y) { y = Add(x, w) }"
        proto = onnx.parser.parse_model('<ir_version: 3, opset_import: ["" : 8]>' + text)
        for name in ("w", "unread"):
            proto.graph.initializer.append(numpy_helper.from_array(np.ones(2, np.float32), name))
        result = typed(load(proto))
        assert [p.name for p in result.signature.inputs] == ["x"]
        assert {v.name: v.type.tensor_type.elem_type for v in result.proto.graph.input}["w"] == FP16


class TestOutputs:
    def test_inputs_and_outputs_keep_their_types_unless_requested(self) -> None:
        result = typed(graphs.graph(CHAIN), inputs={"x": FP16}, outputs={"y": FP16})
        assert [p.dtype for p in (*result.signature.inputs, *result.signature.outputs)] == [FP16, FP16]
        assert casts(result) == []

    def test_fp16_outputs_of_an_island(self) -> None:
        result = typed(graphs.graph(CHAIN), "y", outputs={"y": FP16})
        assert ("y/fp32", "y") in casts(result)

    def test_an_output_that_is_an_input_has_its_type(self) -> None:
        source = graphs.graph("g (float16[2] x) => (float16[2] x, float16[2] y) { y = Neg(x) }")
        result = typed(source, outputs={"x": FP32, "y": FP32})
        assert [p.dtype for p in result.signature.outputs] == [FP16, FP32]

    def test_an_output_that_is_an_initializer(self) -> None:
        source = graphs.graph(
            "g (float[2] x) => (float[2] y, float[2] w) <float[2] w = {0.1, 2.0}> { y = Add(x, w) }"
        )
        assert dtype(typed(source), "w") == FP32
        feeds = {"x": np.ones(2, np.float32)}
        half = typed(source, outputs={"w": FP16})
        np.testing.assert_array_equal(graphs.run(half, feeds)[1], np.asarray([0.1, 2.0], np.float16))

    def test_an_output_that_is_a_large_initializer(self) -> None:
        text = "g (float[512] x) => (float[512] y, float[512] w) { y = Add(x, w) }"
        proto = onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 17]>' + text)
        weight = np.linspace(0, 1, 512, dtype=np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(weight, "w"))
        half = typed(load(proto), outputs={"w": FP16})
        outputs = graphs.run(half, {"x": np.ones(512, np.float32)})
        np.testing.assert_array_equal(outputs[1], weight.astype(np.float16))

    def test_an_output_that_is_a_constant_node(self) -> None:
        source = graphs.graph("""
            g (float[2] x) => (float[2] y, float[2] w) {
                w = Constant<value = float[2] {0.1, 2.0}>()
                y = Add(x, w)
            }""")
        half = typed(source, outputs={"w": FP16})
        assert dtype(half, "w") == FP16
        assert graphs.run(half, {"x": np.ones(2, np.float32)})[1].dtype == np.float16

    def test_two_outputs_of_one_tensor(self) -> None:
        source = graphs.graph("""
            g (float[2] x) => (float[2] y, float16[2] z, float[2] v) {
                y = Neg(x)
                z = Cast<to = 10>(y)
                v = Cast<to = 1>(y)
            }""")
        same_in_fp32(source, typed(source, "y"), {"x": np.asarray([1, 2], np.float32)})
        result = typed(source)
        assert [p.dtype for p in result.signature.outputs] == [FP32, FP16, FP32]

    def test_value_info_follows(self) -> None:
        source = graphs.graph(CHAIN)
        for name in ("a", "b"):
            source.proto.graph.value_info.append(helper.make_tensor_value_info(name, FP32, [2, 3]))
        result = typed(source, "b")
        found = {v.name: v.type.tensor_type.elem_type for v in result.proto.graph.value_info}
        assert found == {"a": FP16, "b": FP32}


class TestOperators:
    def test_resize_keeps_roi_and_scales_in_fp32(self) -> None:
        source = graphs.graph("""
            g (float[1,1,3,3] x) => (float[1,1,5,5] y) <float[4] s = {1, 1, 1.6667, 1.6667}> {
                y = Resize<mode = "linear">(x, , s)
            }""")
        result = typed(source)
        assert [t.data_type for t in result.proto.graph.initializer] == [FP32]
        same_in_fp32(source, result, graphs.random_feeds(source))

    def test_empty_optional_inputs(self) -> None:
        source = graphs.graph("g (float[2] x) => (float[2] y) <float m = {6.0}> { y = Clip(x, , m) }")
        assert list(writer(typed(source), "y/fp16").input) == ["x/fp16", "", "m"]

    def test_an_operator_without_schema_keeps_its_types(self) -> None:
        source = graphs.model("""
            <ir_version: 8, opset_import: ["" : 17, "vendor" : 1]>
            g (float[2] x) => (float[2] y) <float[2] w = {0.1, 0.2}> {
                a = Neg(x)
                b = vendor.Plugin(a, w)
                y = Exp(b)
            }""")
        result = retype(source, facts.infer(source), TypeRequest(lambda *_: FP16))
        node = writer(result, "b")
        assert list(node.input) == ["a/fp32", "w"]
        assert [t.data_type for t in result.proto.graph.initializer] == [FP32]

    def test_sequences_keep_their_types(self) -> None:
        source = graphs.graph("""
            g (float[4] x, int64 i) => (float[2] y) {
                a = Neg(x)
                s = SplitToSequence<axis = 0, keepdims = 1>(a)
                e = SequenceAt(s, i)
                t = SequenceConstruct(e, e)
                y = ConcatFromSequence<axis = 0>(t)
            }""")
        result = typed(source)
        same_in_fp32(source, result, {"x": np.arange(4, dtype=np.float32), "i": np.asarray(1)})
        assert casts(result) == [("x", "x/fp16"), ("a", "a/fp32")]

    @pytest.mark.parametrize(
        ("body", "tensor", "expected"),
        [
            pytest.param("r = RandomNormal<shape = [2]>()", "r", FP32, id="RandomNormal without dtype"),
            pytest.param(
                "r = RandomNormal<shape = [2], dtype = 10>()\n", "r", FP32, id="RandomNormal of FP16"
            ),
            pytest.param("r = RandomNormalLike(x)", "r", FP16, id="RandomNormalLike inherits"),
            pytest.param("r = RandomNormalLike<dtype = 1>(x)", "r", FP32, id="RandomNormalLike of a type"),
            pytest.param("e = EyeLike(m)\n r = ReduceSum(e)", "r", FP16, id="EyeLike inherits"),
            pytest.param("e = EyeLike<dtype = 1>(m)\n r = ReduceSum(e)", "e", FP32, id="EyeLike of a type"),
            pytest.param("r = HannWindow(n)", "r", FP32, id="HannWindow"),
            pytest.param("c = Cast<to = 1>(n)\n r = Neg(c)", "c", FP16, id="Cast from an integer"),
            pytest.param(
                "b = Cast<to = 7>(x)\n r = Cast<to = 1>(b)", "b", TensorProto.INT64, id="Cast to an integer"
            ),
            pytest.param("r = CastLike(n, x)", "r", FP16, id="CastLike"),
            pytest.param("r, m0, s0 = LayerNormalization(x, x)", "m0", FP32, id="LayerNormalization's mean"),
        ],
    )
    def test_types_named_by_attributes(self, body: str, tensor: str, expected: int) -> None:
        source = graphs.graph(
            f"g (float[2] x, float[2,2] m, int64 n) => (int64[k] y) {{ {body}\n y = Shape(r) }}"
        )
        result = typed(source)
        assert dtype(result, tensor) == expected

    def test_outputs_of_layer_normalization_in_bf16(self) -> None:
        source = graphs.graph(
            """g (float[2,4] x, float[4] s) => (float[2,4] y, float[2,1] m) {
                y, m, v = LayerNormalization(x, s)
                z = Neg(m)
            }""",
            opset=17,
        )
        assert dtype(typed(source, low=BF16), "m") == FP32

    def test_unnamed_nodes(self) -> None:
        source = graphs.graph(CHAIN)
        assert not any(n.name for n in source.proto.graph.node)
        names = [n.name for n in typed(source, "b").proto.graph.node if n.op_type == "Cast"]
        assert len(names) == len(set(names)) == 4
        assert all(names)


IF = """
    g (float[2] x, bool c) => (float[2] y) <float[2] w = {0.5, 2.0}> {
        a = Neg(x)
        y = If(c) <
            then_branch = t () => (float[2] p) { p = Mul(a, w) },
            else_branch = e () => (float[2] p) <float[2] k = {3.0, 4.0}> { q = Exp(a)\n p = Add(q, k) }
        >
    }"""

LOOP = """
    g (int64 n, bool c, float[2] x, float[2] w) => (float[2] y, float[k,2] s) {
        y, s = Loop(n, c, x) <
            body = b (int64 i, bool ci, float[2] st) => (bool co, float[2] st2, float[2] sc) {
                co = Identity(ci)
                m = Mul(st, w)
                st2 = Neg(m)
                sc = Exp(st2)
            }
        >
    }"""

SCAN = """
    g (float[2] x, float[3,2] xs) => (float[2] y, float[3,2] ys) {
        y, ys = Scan<num_scan_inputs = 1,
            body = b (float[2] st, float[2] v) => (float[2] st2, float[2] o) {
                st2 = Add(st, v)
                o = Neg(st2)
            }>(x, xs)
    }"""

FEEDS: dict[str, Callable[[], dict[str, Array]]] = {
    "if": lambda: {"x": np.asarray([1, 2], np.float32), "c": np.asarray(False)},
    "loop": lambda: {
        "n": np.asarray(3),
        "c": np.asarray(True),
        "x": np.asarray([1, 2], np.float32),
        "w": np.asarray([0.5, 0.25], np.float32),
    },
    "scan": lambda: {"x": np.ones(2, np.float32), "xs": np.arange(6, dtype=np.float32).reshape(3, 2)},
}


class TestSubgraphs:
    @pytest.mark.parametrize("kept", ["", "If", "Loop", "Scan", "Mul", "Neg", "Add Exp", "If Loop Scan Neg"])
    @pytest.mark.parametrize(
        ("text", "feeds"), [(IF, "if"), (LOOP, "loop"), (SCAN, "scan")], ids=["if", "loop", "scan"]
    )
    def test_any_mixture_of_types_is_valid_and_exact(self, text: str, feeds: str, kept: str) -> None:
        source = graphs.graph(text)
        same_in_fp32(source, typed(source, kept), FEEDS[feeds]())

    def test_captured_constants_are_converted_where_they_belong(self) -> None:
        result = typed(graphs.graph(IF))
        assert [(t.name, t.data_type) for t in result.proto.graph.initializer] == [("w", FP16)]
        inner = list(walk_graphs(result.proto.graph))[2]
        assert [(t.name, t.data_type) for t in inner.initializer] == [("k", FP16)]

    def test_an_outer_tensor_is_cast_once_and_outside(self) -> None:
        result = typed(graphs.graph(LOOP), "Loop")
        outer = [n.output[0] for n in result.proto.graph.node if n.op_type == "Cast"]
        assert outer == ["w/fp16"]

    def test_siblings_may_use_one_name_for_two_tensors(self) -> None:
        source = graphs.graph("""
            g (float[2] x, bool c) => (float[2] y) {
                y = If(c) <
                    then_branch = t () => (float[2] p) { h = Neg(x)\n p = Exp(h) },
                    else_branch = e () => (float[2] p) { h = IsNaN(x)\n f = Cast<to = 1>(h)\n p = Add(x, f) }
                >
            }""")
        for condition in (True, False):
            feeds = {"x": np.asarray([0.5, 2.0], np.float32), "c": np.asarray(condition)}
            same_in_fp32(source, typed(source, "h"), feeds)

    @pytest.mark.parametrize(
        ("branch", "kept"),
        [
            pytest.param(
                "t () => (float[2] k) <float[2] k = {3.0, 4.0}> { u = Neg(a) }", "", id="its own initializer"
            ),
            pytest.param(
                "t () => (float[2] k) { k = Constant<value = float[2] {3.0, 4.0}>() }", "", id="a Constant"
            ),
            pytest.param("t () => (float[2] d) { d = Cast<to = 1>(a) }", "", id="a Cast of an outer tensor"),
        ],
    )
    def test_outputs_of_a_branch(self, branch: str, kept: str) -> None:
        source = graphs.graph(f"""
            g (float[2] x, bool c) => (float[2] y) <float[2] w = {{0.5, 2.0}}> {{
                a = Neg(x)
                b = Mul(a, w)
                y = If(c) <then_branch = {branch}, else_branch = e () => (float[2] p) {{ p = Identity(b) }}>
            }}""")
        result = typed(source, kept)
        graphs.run(result, {"x": np.ones(2, np.float32), "c": np.asarray(True)})

    @pytest.mark.parametrize("kept", ["", "If", "a", "a If"])
    @pytest.mark.parametrize("tensor", ["a", "x", "w"], ids=["computed", "graph input", "initializer"])
    def test_a_branch_may_return_an_outer_tensor(self, tensor: str, kept: str) -> None:
        """onnx.checker refuses this since 1.20, and ONNX Runtime always did, but such models exist."""
        source = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17]>
            g (float[2] x, bool c) => (float[2] y, float[2] a) <float[2] w = {{0.5, 2.0}}> {{
                a = Neg(x)
                y = If(c) <
                    then_branch = t () => (float[2] {tensor}) {{ u = Neg(a) }},
                    else_branch = e () => (float[2] p) {{ p = Add(a, w) }}
                >
            }}""")
        result = typed(Model(source), kept)
        feeds = {"x": np.asarray([-3, 4], np.float32), "c": np.asarray(True)}
        expected = {"a": -feeds["x"], "x": feeds["x"], "w": np.asarray([0.5, 2.0], np.float32)}
        np.testing.assert_array_equal(
            graphs.run(reference(result, facts.infer(result)), feeds)[0], expected[tensor]
        )

    def test_a_loop_that_returns_its_state_unchanged(self) -> None:
        source = graphs.graph("""
            g (int64 n, bool c, float[2] x) => (float[2] y, float[k,2] s) {
                y, s = Loop(n, c, x) <
                    body = b (int64 i, bool ci, float[2] st) => (bool ci, float[2] st, float[2] sc)
                        { sc = Neg(st) }
                >
            }""")
        typed(source)
        typed(source, "Loop")

    def test_types_that_subgraphs_omit(self) -> None:
        source = graphs.graph(LOOP)
        body = source.proto.graph.node[0].attribute[0].g
        for value in (*body.input[2:], *body.output):
            value.ClearField("type")
        result = typed(source)
        same_in_fp32(graphs.graph(LOOP), result, FEEDS["loop"]())

    def test_nested_subgraphs(self) -> None:
        source = graphs.graph("""
            g (int64 n, bool c, float[2] x, float[2] w) => (float[2] y) {
                y = Loop(n, c, x) <
                    body = b (int64 i, bool ci, float[2] st) => (bool co, float[2] st2) {
                        co = Identity(ci)
                        h = Mul(st, w)
                        st2 = If(ci) <
                            then_branch = t () => (float[2] p) { p = Add(h, w) },
                            else_branch = e () => (float[2] p) { p = Sub(h, st) }
                        >
                    }
                >
            }""")
        for kept in ("", "Loop", "If", "Mul", "Add Sub", "Loop If"):
            same_in_fp32(source, typed(source, kept), FEEDS["loop"]())

    def test_double_states_are_unchanged(self) -> None:
        source = graphs.graph(LOOP.replace("float[", "double["))
        assert typed(source).same_as(source)


OPERATORS: dict[str, int] = {
    "Neg": 1,
    "Abs": 1,
    "Relu": 1,
    "Identity": 1,
    "Add": 2,
    "Sub": 2,
    "Mul": 2,
    "Max": 2,
    "Min": 2,
}
"""Operator and number of inputs; all have FP16 and BF16."""


@st.composite
def random_graphs(draw: st.DrawFn) -> Model:
    """A graph of elementwise operators, Casts and constants over float[2] tensors of mixed types."""
    given_types = draw(st.sampled_from([[FP32], [FP32, FP16]]))
    types = {"x": draw(st.sampled_from(given_types)), "w": draw(st.sampled_from(given_types))}
    nodes = []
    for index in range(draw(st.integers(1, 9))):
        out = f"t{index}"
        first = draw(st.sampled_from(sorted(types)))
        same = sorted(name for name in types if types[name] == types[first])
        op = draw(st.sampled_from([*OPERATORS, *["Cast"] * (4 if len(given_types) > 1 else 1)]))
        if op == "Cast" and first == "w":
            op = "Neg"  # clean-casts runs first and folds Casts of constants
        if op == "Cast":
            types[out] = draw(st.sampled_from(given_types))
            nodes.append(helper.make_node("Cast", [first], [out], to=types[out]))
        else:
            types[out] = types[first]
            inputs = [first, *(draw(st.sampled_from(same)) for _ in range(OPERATORS[op] - 1))]
            nodes.append(helper.make_node(op, inputs, [out]))
    names = draw(st.lists(st.sampled_from(sorted(types.keys() - {"x", "w"})), min_size=1, unique=True))
    weight = numpy_helper.from_array(
        np.asarray([0.5, -3.0], helper.tensor_dtype_to_np_dtype(types["w"])), "w"
    )
    values = {name: helper.make_tensor_value_info(name, types[name], [2]) for name in types}
    graph = helper.make_graph(nodes, "g", [values["x"]], [values[name] for name in names], [weight])
    opset = helper.make_opsetid("", 17)
    return load(helper.make_model(graph, opset_imports=[opset], ir_version=8))


@given(source=random_graphs(), data=st.data())
def test_random_graphs_with_random_types_stay_valid(source: Model, data: st.DataObject) -> None:
    nodes = sorted({n.output[0] for n in source.proto.graph.node})
    kept = " ".join(data.draw(st.lists(st.sampled_from(nodes), unique=True)))
    changed: dict[str, int] = data.draw(st.sampled_from([{}, {"x": FP16}, {"x": FP32}]))
    ends: dict[str, int] = {
        p.name: data.draw(st.sampled_from([FP32, FP16])) for p in source.signature.outputs
    }
    typed(source, kept, inputs=changed, outputs=ends)


@given(source=random_graphs())
def test_fp32_on_fp32_changes_no_bit(source: Model) -> None:
    if any(p.dtype != FP32 for p in (*source.signature.inputs, *source.signature.outputs)):
        return
    known = facts.infer(source)
    if any(t.dtype != FP32 for t in known.main.values()):
        return
    feeds = {"x": np.asarray([0.1, -7e4], np.float32)}
    expected = graphs.run(source, feeds)
    for made in (typed(source, low=FP32), reference(source, known), emulation(source, known)):
        for a, b in zip(expected, graphs.run(made, feeds), strict=True):
            np.testing.assert_array_equal(a, b)


@given(source=random_graphs(), data=st.data())
def test_lowering_and_back_changes_no_bit(source: Model, data: st.DataObject) -> None:
    if any(t.dtype != FP32 for t in facts.infer(source).main.values()):
        return
    nodes = sorted({n.output[0] for n in source.proto.graph.node})
    kept = " ".join(data.draw(st.lists(st.sampled_from(nodes), unique=True)))
    same_in_fp32(source, typed(source, kept), {"x": np.asarray([0.1, -7e4], np.float32)})
