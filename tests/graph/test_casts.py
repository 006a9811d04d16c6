"""Types of tensors: where Casts are, what is unchanged, and that the result is always a valid model."""

import graphs
import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import NodeProto, TensorProto, helper, numpy_helper

from rewriter.base.errors import PassError
from rewriter.ir.graph.casts import TypeRequest, retype
from rewriter.ir.model import Array, Model, load, walk_graphs
from rewriter.ir.plan import logical_name
from rewriter.runtime.emulation import emulation, reference, rounded

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
    result = retype(source, request)
    onnx.checker.check_model(result.whole(), full_check=True)
    check_facts(result)
    check_facts(rounded(result))
    again = retype(result, request)
    if outputs and {p.name: p.dtype for p in source.signature.outputs} != outputs:
        # an output that gets the type of a rounding lets the next run share its Cast
        result, again = again, retype(again, request)
    assert again.same_as(result), "a second run changes nothing"
    return result


def check_facts(result: Model) -> None:
    """What the result knows without inference is what inference finds; it may know more sizes."""
    inferred = Model(result.proto, result.weights).facts(strict=True)
    for mine, theirs in zip(result.facts().scopes, inferred.scopes, strict=True):
        assert {name: tensor.dtype for name, tensor in mine.items()} == {
            n: t.dtype for n, t in theirs.items()
        }
        for name, tensor in theirs.items():
            sizes = zip(mine[name].shape or (), tensor.shape or (), strict=tensor.shape is not None)
            assert all(a == b for a, b in sizes if isinstance(b, int)), name


def dtype(source: Model, tensor: str, scope: int = 0) -> int:
    return source.facts().scopes[scope][tensor].dtype


def casts(source: Model) -> list[tuple[str, str]]:
    """(input, output) of every Cast in all graphs."""
    nodes = [n for g in walk_graphs(source.proto.graph) for n in g.node]
    return [(n.input[0], n.output[0]) for n in nodes if n.op_type == "Cast"]


def read_by(source: Model, tensor: str) -> list[str]:
    """The inputs of the node that writes a tensor."""
    nodes = [n for g in walk_graphs(source.proto.graph) for n in g.node]
    return list(next(n for n in nodes if tensor in n.output).input)


def same_in_fp32(given_model: Model, result: Model, feeds: dict[str, Array]) -> None:
    """With every type back at FP32, the result is bit-equal to the given model."""
    expected = graphs.run(given_model, feeds)
    back = reference(result)
    types = {p.name: helper.tensor_dtype_to_np_dtype(p.dtype) for p in back.signature.inputs}
    actual = graphs.run(back, {n: a.astype(types[n]) for n, a in feeds.items()})
    for a, b in zip(expected, actual, strict=True):
        np.testing.assert_array_equal(a, b)


VECTOR = "g (float[2] x) => (float[2] y)"
CHAIN = f"{VECTOR} {{ a = Neg(x) b = Exp(a) c = Abs(b) y = Relu(c) }}"
SEQUENCE = """g (float[4] x, int64 i) => (float[2] y) {
    a = Neg(x) s = SplitToSequence<axis = 0, keepdims = 1>(a) e = SequenceAt(s, i)
    t = SequenceConstruct(e, e) y = ConcatFromSequence<axis = 0>(t) }"""


@pytest.mark.parametrize(("text", "opset", "kept", "expected"), graphs.cases("graph/casts.txt"))
def test_casts_are_where_types_change(text: str, opset: str, kept: str, expected: str) -> None:
    source = graphs.graph(text, opset=int(opset), ir=9)
    before = source.copy()
    assert ", ".join(map(" -> ".join, casts(typed(source, kept)))) == expected
    assert source.same_as(before), "the given model is unchanged"


MATMUL = "g (float[2,3] x) => (float[2,3] y) <float[3,3] w = {1,2,3,4,5,6,7,8,9}> { y = MatMul(x, w) }"
SETS = {"fp16": FP16, "fp32": FP32, "bf16": BF16, "double": TensorProto.DOUBLE, "int64": TensorProto.INT64}


@pytest.mark.parametrize(("text", "options", "kept", "expected"), graphs.cases("graph/types.txt"))
def test_types_of_tensors(text: str, options: str, kept: str, expected: str) -> None:
    low, opset = options.split()
    result = typed(graphs.graph(text, opset=int(opset), ir=9), kept, low=SETS[low])
    wanted = {name: SETS[kind] for name, kind in (pair.split("=") for pair in expected.split())}
    assert {name: dtype(result, name) for name in wanted} == wanted


@pytest.mark.parametrize(("text", "kept", "expected"), graphs.cases("graph/reads.txt"))
def test_nodes_read_the_type_that_they_need(text: str, kept: str, expected: str) -> None:
    result = typed(graphs.graph(text), kept)
    wanted = [pair.partition(" <- ") for pair in expected.split("; ")]
    assert {name: ", ".join(read_by(result, name)) for name, _, _ in wanted} == {n: r for n, _, r in wanted}


def test_an_operator_without_schema_keeps_its_types() -> None:
    source = graphs.model("""<ir_version: 8, opset_import: ["" : 17, "vendor" : 1]>
        g (float[2] x) => (float[2] y) <float[2] w = {0.1, 0.2}>
        { a = Neg(x) b = vendor.Plugin(a, w) y = Exp(b) }""")
    result = retype(source, TypeRequest(lambda *_: FP16))
    assert read_by(result, "b") == ["a/fp32", "w"]
    assert [t.data_type for t in result.proto.graph.initializer] == [FP32]


def test_new_nodes_have_names_and_the_tag() -> None:
    source = graphs.graph(CHAIN)
    result = retype(source, TypeRequest(lambda *_: FP16, tag="mixed-precision"))
    new = [n for n in result.proto.graph.node if n.op_type == "Cast"]
    assert [[p.value for p in n.metadata_props] for n in new] == [["mixed-precision"]] * 2
    assert len({n.name for n in new} - {""}) == 2


class TestConstants:
    def weighted(self, value: Array, text: str = MATMUL) -> Model:
        source = graphs.graph(text)
        source.proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(value, "w"))
        return load(source.proto)

    VALUES = (
        pytest.param(-1e-9, -0.0, id="a tiny negative value becomes -0.0"),
        pytest.param(1e-9, 0.0, id="a tiny positive value becomes 0.0"),
        pytest.param(1e-7, 2**-24 * 2, id="a subnormal is rounded to nearest"),
        pytest.param(65519.0, 65504.0, id="a value that rounds to the largest number fits"),
        pytest.param(-np.inf, -np.inf, id="an infinity stays infinite"),
    )

    @pytest.mark.parametrize(("value", "expected"), VALUES)
    def test_values_are_rounded_with_their_sign(self, value: float, expected: float) -> None:
        result = typed(self.weighted(np.full((3, 3), value, np.float32)))
        got = numpy_helper.to_array(result.proto.graph.initializer[0])
        np.testing.assert_array_equal(got, np.full((3, 3), expected, np.float16))
        assert np.all(np.signbit(got) == np.signbit(np.float32(expected)))

    HUGE = (
        pytest.param(65520.0, FP16, id="FP16 beyond 65519"),
        pytest.param(np.finfo(np.float32).min, FP16, id="FP16 of -FLT_MAX"),
        pytest.param(np.finfo(np.float32).max, BF16, id="BF16 of FLT_MAX"),
    )

    @pytest.mark.parametrize(("value", "low"), HUGE)
    def test_a_value_that_would_become_infinite_is_an_error(self, value: float, low: int) -> None:
        source = self.weighted(np.full((3, 3), value, np.float32))
        source.proto.opset_import[0].version = 22
        with pytest.raises(PassError, match=r"(?s)w: the constant holds values up to.*keep"):
            typed(source, low=low)

    @pytest.mark.parametrize("outputs", [{}, {"w": FP16}], ids=["a weight", "an output, too"])
    def test_a_large_initializer_is_converted_outside_the_graph(self, outputs: dict[str, int]) -> None:
        more = ", float[512] w" if outputs else ""
        weight = np.linspace(0, 1, 512, dtype=np.float32)
        text = f"g (float[512] x, float[512] w) => (float[512] y{more}) {{ y = Add(x, w) }}"
        result = typed(graphs.with_weights(text, {"w": weight}), outputs=outputs)
        (half,) = (a for a in result.weights.values() if a.dtype == np.float16)
        np.testing.assert_array_equal(half, weight.astype(np.float16))
        graphs.run(result, {"x": np.ones(512, np.float32)})

    def test_an_initializer_that_is_listed_as_input(self) -> None:
        source = graphs.model("""<ir_version: 3, opset_import: ["" : 8]>
            g (float[2] x, float[2] w, float[2] unread) => (float[2] y)
            <float[2] w = {1, 1}, float[2] unread = {1, 1}> { y = Add(x, w) }""")
        result = typed(source)
        assert [p.name for p in result.signature.inputs] == ["x"]
        assert {v.name: v.type.tensor_type.elem_type for v in result.proto.graph.input}["w"] == FP16


class TestOutputs:
    def test_inputs_and_outputs_keep_their_types_unless_requested(self) -> None:
        result = typed(graphs.graph(CHAIN), inputs={"x": FP16}, outputs={"y": FP16})
        assert [p.dtype for p in (*result.signature.inputs, *result.signature.outputs)] == [FP16, FP16]
        assert casts(result) == []
        assert ("y/fp32", "y") in casts(typed(graphs.graph(CHAIN), "y", outputs={"y": FP16}))

    def test_an_output_that_is_an_input_has_its_type(self) -> None:
        source = graphs.graph("g (float16[2] x) => (float16[2] x, float16[2] y) { y = Neg(x) }")
        result = typed(source, outputs={"x": FP32, "y": FP32})
        assert [p.dtype for p in result.signature.outputs] == [FP16, FP32]

    HELD = ("<float[2] w = {0.1, 2.0}> {", "{ w = Constant<value = float[2] {0.1, 2.0}>()")

    @pytest.mark.parametrize("held", HELD, ids=["an initializer", "a Constant"])
    def test_an_output_that_is_a_constant(self, held: str) -> None:
        half = typed(
            graphs.graph(f"g (float[2] x) => (float[2] y, float[2] w) {held} y = Add(x, w) }}"),
            outputs={"w": FP16},
        )
        outputs = graphs.run(half, {"x": np.ones(2, np.float32)})
        np.testing.assert_array_equal(outputs[1], np.asarray([0.1, 2.0], np.float16))
        assert outputs[1].dtype == np.float16

    def test_two_outputs_of_one_tensor(self) -> None:
        source = graphs.graph(
            "g (float[2] x) => (float[2] y, float16[2] z, float[2] v)"
            " { y = Neg(x) z = Cast<to = 10>(y) v = Cast<to = 1>(y) }"
        )
        same_in_fp32(source, typed(source, "y"), {"x": np.asarray([1, 2], np.float32)})
        assert [p.dtype for p in typed(source).signature.outputs] == [FP32, FP16, FP32]

    def test_value_info_follows(self) -> None:
        source = graphs.graph(CHAIN)
        for name in ("a", "b"):
            source.proto.graph.value_info.append(helper.make_tensor_value_info(name, FP32, [2]))
        found = typed(source, "b").proto.graph.value_info
        assert {v.name: v.type.tensor_type.elem_type for v in found} == {"a": FP16, "b": FP32}


IF = """
    g (float[2] x, bool c) => (float[2] y) <float[2] w = {0.5, 2.0}> {
        a = Neg(x)
        y = If(c) <then_branch = t () => (float[2] p) { p = Mul(a, w) },
                   else_branch = e () => (float[2] p) <float[2] k = {3.0, 4.0}> { q = Exp(a) p = Add(q, k) }>
    }"""

LOOP = """
    g (int64 n, bool c, float[2] x, float[2] w) => (float[2] y, float[k,2] s) {
        y, s = Loop(n, c, x) <
            body = b (int64 i, bool ci, float[2] st) => (bool co, float[2] st2, float[2] sc) {
                co = Identity(ci) m = Mul(st, w) st2 = Neg(m) sc = Exp(st2)
            }>
    }"""

SCAN = """
    g (float[2] x, float[3,2] xs) => (float[2] y, float[3,2] ys) {
        y, ys = Scan<num_scan_inputs = 1, body = b (float[2] st, float[2] v) => (float[2] st2, float[2] o)
            { st2 = Add(st, v) o = Neg(st2) }>(x, xs)
    }"""

NESTED = """
    g (int64 n, bool c, float[2] x, float[2] w) => (float[2] y) {
        y = Loop(n, c, x) <
            body = b (int64 i, bool ci, float[2] st) => (bool co, float[2] st2) {
                co = Identity(ci) h = Mul(st, w)
                st2 = If(ci) <then_branch = t () => (float[2] p) { p = Add(h, w) },
                              else_branch = e () => (float[2] p) { p = Sub(h, st) }>
            }>
    }"""

SIBLINGS = """
    g (float[2] x, bool c) => (float[2] y) {
        y = If(c) <then_branch = t () => (float[2] p) { h = Neg(x) p = Exp(h) },
                   else_branch = e () => (float[2] p) { h = IsNaN(x) f = Cast<to = 1>(h) p = Add(x, f) }>
    }"""

STATE = """
    g (int64 n, bool c, float[2] x) => (float[2] y, float[k,2] s) {
        y, s = Loop(n, c, x) <body = b (int64 i, bool ci, float[2] st) => (bool ci, float[2] st, float[2] sc)
            { sc = Neg(st) }>
    }"""

CONSTANT = f"{VECTOR} {{ w = Constant<FORM>() y = Add(x, w) }}"

EXACT = [
    pytest.param(IF, "|If|Mul|Neg|Add Exp|If Neg", id="If"),
    pytest.param(LOOP, "|Loop|Mul|Neg|Exp|Loop Neg", id="Loop"),
    pytest.param(SCAN, "|Scan|Neg|Add|Scan Neg", id="Scan"),
    pytest.param(NESTED, "|Loop|If|Mul|Add Sub|Loop If", id="nested"),
    pytest.param(SIBLINGS, "|h", id="siblings that use one name for two tensors"),
    pytest.param(STATE, "|Loop", id="a Loop that returns its state unchanged"),
    pytest.param(SEQUENCE, "", id="sequences"),
    *(
        pytest.param(CONSTANT.replace("FORM", form), "", id=form)
        for form in ("value_float = 0.5", "value_floats = [0.5, 2.0]", "value = float[2] {0.5, 2.0}")
    ),
]


@pytest.mark.parametrize(("text", "kept"), EXACT)
def test_any_mixture_of_types_is_valid_and_exact(text: str, kept: str) -> None:
    source = graphs.graph(text)
    feeds = graphs.random_feeds(source)
    for condition in (True, False) if "bool c" in text and "Loop" not in text else (True,):
        given_feeds = feeds | ({"c": np.asarray(condition)} if "bool c" in text else {})
        for names in kept.split("|"):
            same_in_fp32(source, typed(source, names), given_feeds)


class TestSubgraphs:
    def test_captured_constants_are_converted_where_they_belong(self) -> None:
        result = typed(graphs.graph(IF))
        assert [(t.name, t.data_type) for t in result.proto.graph.initializer] == [("w", FP16)]
        inner = list(walk_graphs(result.proto.graph))[2]
        assert [(t.name, t.data_type) for t in inner.initializer] == [("k", FP16)]

    def test_an_outer_tensor_is_cast_once_and_outside(self) -> None:
        result = typed(graphs.graph(LOOP), "Loop")
        assert [n.output[0] for n in result.proto.graph.node if n.op_type == "Cast"] == ["w/fp16"]

    BRANCHES = (
        pytest.param("() => (float[2] k) <float[2] k = {3.0, 4.0}> { u = Neg(a) }", id="its own initializer"),
        pytest.param("() => (float[2] k) { k = Constant<value = float[2] {3.0, 4.0}>() }", id="a Constant"),
        pytest.param("() => (float[2] d) { d = Cast<to = 1>(a) }", id="a Cast of an outer tensor"),
    )

    @pytest.mark.parametrize("branch", BRANCHES)
    def test_outputs_of_a_branch(self, branch: str) -> None:
        result = typed(
            graphs.graph(f"""g (float[2] x, bool c) => (float[2] y) <float[2] w = {{0.5, 2.0}}> {{
                a = Neg(x) b = Mul(a, w)
                y = If(c) <then_branch = t {branch}, else_branch = e () => (float[2] p) {{ p = Identity(b) }}>
            }}""")
        )
        graphs.run(result, {"x": np.ones(2, np.float32), "c": np.asarray(True)})

    @pytest.mark.parametrize("kept", ["", "If", "a", "a If"])
    @pytest.mark.parametrize("tensor", ["a", "x", "w"], ids=["computed", "graph input", "initializer"])
    def test_a_branch_may_return_an_outer_tensor(self, tensor: str, kept: str) -> None:
        """onnx.checker refuses this since 1.20, and ONNX Runtime always did, but such models exist."""
        source = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17]>
            g (float[2] x, bool c) => (float[2] y, float[2] a) <float[2] w = {{0.5, 2.0}}> {{
                a = Neg(x)
                y = If(c) <then_branch = t () => (float[2] {tensor}) {{ u = Neg(a) }},
                           else_branch = e () => (float[2] p) {{ p = Add(a, w) }}>
            }}""")
        result = typed(Model(source), kept)
        feeds = {"x": np.asarray([-3, 4], np.float32), "c": np.asarray(True)}
        expected = {"a": -feeds["x"], "x": feeds["x"], "w": np.asarray([0.5, 2.0], np.float32)}
        found = graphs.run(reference(result), feeds)[0]
        np.testing.assert_array_equal(found, expected[tensor])

    def test_types_that_subgraphs_omit(self) -> None:
        source = graphs.graph(LOOP)
        body = source.proto.graph.node[0].attribute[0].g
        for value in (*body.input[2:], *body.output):
            value.ClearField("type")
        whole = graphs.graph(LOOP)
        same_in_fp32(whole, typed(source), graphs.random_feeds(whole))

    def test_double_states_are_unchanged(self) -> None:
        source = graphs.graph(LOOP.replace("float[", "double["))
        assert typed(source).same_as(source)


OPERATORS = {
    **dict.fromkeys("Neg Abs Relu Identity".split(), 1),
    **dict.fromkeys("Add Sub Mul Max Min".split(), 2),
}
"""Operator and number of inputs; all have FP16 and BF16."""


@st.composite
def random_graphs(draw: st.DrawFn) -> Model:
    """A graph of elementwise operators, Casts and constants over float[2] tensors of mixed types."""
    mixed = draw(st.booleans())
    types = {name: draw(st.sampled_from([FP32, FP16] if mixed else [FP32])) for name in "xw"}
    lines = []
    for index in range(draw(st.integers(1, 9))):
        out, first = f"t{index}", draw(st.sampled_from(sorted(types)))
        same = sorted(name for name in types if types[name] == types[first])
        op = draw(st.sampled_from([*OPERATORS, *["Cast"] * (4 if mixed else 1)]))
        if op == "Cast" and first != "w":  # clean-casts runs first and folds Casts of constants
            types[out] = draw(st.sampled_from([FP32, FP16] if mixed else [FP32]))
            lines.append(f"{out} = Cast<to = {types[out]}>({first})")
        else:
            types[out], op = types[first], "Neg" if op == "Cast" else op
            inputs = [first, *(draw(st.sampled_from(same)) for _ in range(OPERATORS[op] - 1))]
            lines.append(f"{out} = {op}({', '.join(inputs)})")
    names = draw(st.lists(st.sampled_from(sorted(types.keys() - {"x", "w"})), min_size=1, unique=True))
    kinds = {FP32: "float", FP16: "float16"}
    outputs = ", ".join(f"{kinds[types[name]]}[2] {name}" for name in names)
    weight = {FP32: "{0.5, -3.0}", FP16: "{14336, 49664}"}[types["w"]]  # FP16 is written by its bits
    text = f"<{kinds[types['w']]}[2] w = {weight}> {{ {' '.join(lines)} }}"
    return graphs.graph(f"g ({kinds[types['x']]}[2] x) => ({outputs}) {text}")


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
    if any(t.dtype != FP32 for t in source.facts().main.values()):
        return
    feeds = {"x": np.asarray([0.1, -7e4], np.float32)}
    expected = graphs.run(source, feeds)
    for made in (typed(source, low=FP32), reference(source), emulation(source)):
        for a, b in zip(expected, graphs.run(made, feeds), strict=True):
            np.testing.assert_array_equal(a, b)


@given(source=random_graphs(), data=st.data())
def test_lowering_and_back_changes_no_bit(source: Model, data: st.DataObject) -> None:
    if any(t.dtype != FP32 for t in source.facts().main.values()):
        return
    nodes = sorted({n.output[0] for n in source.proto.graph.node})
    kept = " ".join(data.draw(st.lists(st.sampled_from(nodes), unique=True)))
    same_in_fp32(source, typed(source, kept), {"x": np.asarray([0.1, -7e4], np.float32)})
