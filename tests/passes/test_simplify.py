"""simplify: correct folding, nodes that must stay, and a silent terminal."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import pytest
from graphs import apply, graph, model, ops, random_feeds, run

from rewriter.graph import TAG
from rewriter.model import Model, load
from rewriter.passes.simplify import OPTIMIZERS, Simplify, skipped_always


def weighted(source: Model, **weights: np.ndarray) -> Model:
    """The model with large initializers in place of the inputs of those names."""
    kept = [v for v in source.proto.graph.input if v.name not in weights]
    kept = [onnx.ValueInfoProto.FromString(v.SerializeToString()) for v in kept]
    del source.proto.graph.input[:]
    source.proto.graph.input.extend(kept)
    for name, value in weights.items():
        source.proto.graph.initializer.append(source.detached_tensor(name, value))
    return source


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param(
            """g (float[N,6] x) => (float[N,2,3] y) <int64[1] a = {0}, int64[1] b = {2}, int64[1] c = {3}> {
                s = Concat<axis = 0>(a, b, c) i = Identity(x) y = Reshape(i, s) }""",
            ["Reshape"],
            id="a shape out of constants",
        ),
        pytest.param(
            """g (float[2,3] x) => (float[2,3] y) {
                s = Shape(x) z = ConstantOfShape(s) o = Add(z, z) y = Add(x, o) }""",
            ["Add"],
            id="the shape of a static input",
        ),
        pytest.param(
            """g (float[2,3] x) => (float[2,3] y) {
                a = Cast<to = 1>(x) b = Dropout(a) c = Identity(b) y = Relu(c) }""",
            ["Relu"],
            id="what does nothing",
        ),
        pytest.param(
            """g (float[3] x) => (float[3] y) <bool c = {1}> {
                y = If(c) <then_branch = t () => (float[3] o) { o = Relu(x) },
                           else_branch = e () => (float[3] o) { o = Neg(x) }> }""",
            ["Relu"],
            id="an If whose condition is constant",
        ),
    ],
)
def test_simplified_and_bit_equal(body: str, expected: list[str]) -> None:
    source = graph(body)
    result, report = apply(Simplify(), source)
    assert report.changes
    assert not report.refusals
    assert ops(result) == expected
    assert result.signature == source.signature
    feeds = random_feeds(source)
    np.testing.assert_array_equal(run(result, feeds)[0], run(source, feeds)[0])


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("g (float[2,3] x) => (float[2,3] y) { y = Relu(x) }", id="nothing to do"),
        pytest.param(
            "g (float[2,3] x) => (float[2,3] y) { a = Cast<to = 10>(x) b = Cast<to = 1>(a) y = Relu(b) }",
            id="a rounding detour",
        ),
        pytest.param(
            """g (float16[2,3] x, float16[3,4] w) => (float16[2,4] y) <float[4] zeros = {0,0,0,0}> {
                m = MatMul(x, w) c = Cast<to = 1>(m) a = Add(c, zeros) y = Cast<to = 10>(a) }""",
            id="zeros that make a product sum in FP32",
        ),
        pytest.param(
            """g (float[3] x) => (float[3] y) <int8[3] w = {1, 2, 3}, float s = {0.1}, int8 z = {0}> {
                a = DequantizeLinear(w, s, z) q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z)
                y = Add(a, d) }""",
            id="quantised weights and activations",
        ),
        pytest.param(
            "g (float[N,3] x) => (float[N,3] y) { s = Shape(x) z = ConstantOfShape(s) y = Add(x, z) }",
            id="the shape of a dynamic input",
        ),
        pytest.param(
            "g (float[3] x) => (float[3] y) { r = RandomNormal<shape = [3]>() y = Add(x, r) }",
            id="random numbers",
        ),
        pytest.param(
            "g (float[2,3] x, float[3,4] w, float[4] b) => (float[2,4] y) { m = MatMul(x, w) y = Add(m, b) }",
            id="MatMul and Add are not made a Gemm",
        ),
        pytest.param(
            """g (float[2,4,8] x, float[8,8] w, float[8] b) => (float[2,4,8] y) {
                m = MatMul(x, w) y = Add(m, b) }""",
            id="nor are they with a batch",
        ),
        pytest.param(
            """g (float[2,4,8] x) => (float[2,4,8] y)
            <float two = {2}, float eps = {1e-5}, float[8] s = {1,2,3,4,5,6,7,8}, float[1] b = {3}> {
                m = ReduceMean<axes = [-1]>(x) d = Sub(x, m) p = Pow(d, two) v = ReduceMean<axes = [-1]>(p)
                e = Add(v, eps) r = Sqrt(e) n = Div(d, r) a = Mul(n, s) y = Add(a, b) }""",
            id="a LayerNorm, which has a pass of its own",
        ),
        pytest.param(
            """g (float[1,2,5,5] x, float[3,2,3,3] w) => (float[1,3,3,3] y)
            <float[1,3,1,1] s = {1.5, 2.5, 3.5}> {
                c = Conv(x, w) y = Mul(c, s) }""",
            id="a factor after a Conv",
        ),
        pytest.param(
            "g (float[2,3] x) => (int64[2,1] y) { s = Softmax(x) y = ArgMax<axis = 1>(s) }",
            id="ArgMax of Softmax, whose ties differ",
        ),
        pytest.param(
            "g (float[2,3] x) => (float[2,3] y, float[2,3] z) { y = Identity(x) z = Identity(y) }",
            id="outputs that are the input",
        ),
        pytest.param(
            "g (float[3] x, float[3] unused) => (float[3] y) { y = Relu(x) }", id="an input that nobody reads"
        ),
        pytest.param(
            """g (float[3] x, bool c) => (float[3] y) {
                y = If(c) <then_branch = t () => (float[3] o) { l = Relu(x) o = Neg(l) },
                           else_branch = e () => (float[3] p) { p = Neg(x) }> }""",
            id="an If with unnamed nodes in its branches",
        ),
        pytest.param(
            "g (float[2,3] x) => (float[2,3] y) { p = MyPlugin(x) q = Relu(p) y = Neg(q) }",
            id="a plugin",
        ),
    ],
)
def test_unchanged_to_the_byte(body: str) -> None:
    source = graph(body)
    result, report = apply(Simplify(), source)
    assert result.same_as(source)
    assert not report.changes
    assert not report.refusals


def test_a_second_run_changes_nothing() -> None:
    source = graph(
        """g (float[2,6] x) => (float[2,2,3] y) {
            s = Constant<value_ints = [2, 2, 3]>() h = Constant<value_float = 0.5>() m = Mul(x, h)
            i = Identity(m) r = Reshape(i, s) y = Add(r, h) }"""
    )
    once, _ = apply(Simplify(), source)
    twice, report = apply(Simplify(), once)
    assert not report.changes
    assert twice.same_as(once)


def test_dynamic_axes_stay_dynamic() -> None:
    source = graph(
        """g (float[N,3,H,W] x) => (float[N,M] y) {
            i = Identity(x) s = Shape(i) z = Constant<value_ints = [0]>() n = Gather(s, z)
            o = Constant<value_ints = [-1]>() t = Concat<axis = 0>(n, o) y = Reshape(i, t) }"""
    )
    result, report = apply(Simplify(), source)
    assert report.changes
    assert result.signature == source.signature
    for height in (2, 5):
        feeds = {"x": noise(2, 3, height, 4)}
        np.testing.assert_array_equal(run(result, feeds)[0], run(source, feeds)[0])


def test_weights_that_stay_keep_their_arrays() -> None:
    source = weighted(
        graph("g (float[2,30] x, float[30,40] w, float[30,40] v) => (float[2,40] y) "
              "{ i = Identity(x) m = MatMul(i, w) t = Neg(v) n = MatMul(i, t) y = Add(m, n) }"),
        w=noise(30, 40),
        v=noise(30, 40),
    )  # fmt: skip
    result, _ = apply(Simplify(), source)
    assert ops(result) == ["MatMul", "MatMul", "Add"]
    assert result.weights["w"] is source.weights["w"]
    assert "v" not in result.weights
    np.testing.assert_array_equal(result.weights["t"], -source.weights["v"])
    feeds = random_feeds(source)
    np.testing.assert_array_equal(run(result, feeds)[0], run(source, feeds)[0])


@pytest.fixture
def handed_over(monkeypatch: pytest.MonkeyPatch) -> list[onnx.ModelProto]:
    """What onnxsim is given from now on."""
    import onnxsim

    simplify, seen = onnxsim.simplify, []

    def spy(proto: onnx.ModelProto, **options: object) -> tuple[onnx.ModelProto, bool]:
        seen.append(proto)
        return simplify(proto, **options)  # type: ignore[no-any-return]

    monkeypatch.setattr(onnxsim, "simplify", spy)
    monkeypatch.setattr("rewriter.children.inside", True)  # no child, whose calls the spy would not see
    return seen


def test_weights_of_no_constant_chain_are_not_handed_over(handed_over: list[onnx.ModelProto]) -> None:
    source = weighted(
        graph("g (float[2,30] x, float[30,40] w) => (float[2,40] y) { i = Identity(x) y = MatMul(i, w) }"),
        w=noise(30, 40),
    )
    apply(Simplify(), source)
    assert handed_over
    assert max(proto.ByteSize() for proto in handed_over) < source.weights["w"].nbytes


SMALL = [
    pytest.param("Add", [0.5, 0.0, 1.0], False, id="in arithmetic"),
    pytest.param("Add", [0.0, 0.0, 0.0], True, id="zeros, without which an Add is idle"),
    pytest.param("Mul", [1.0, 1.0, 1.0], True, id="ones"),
    pytest.param("Max", [0.5, 0.0, 1.0], True, id="in another operator"),
    pytest.param("Add", [0.5], True, id="a scalar"),
]


@pytest.mark.parametrize(("op", "values", "given"), SMALL)
def test_small_constants_that_no_optimizer_reads_are_not_handed_over(
    op: str, values: list[float], given: bool, handed_over: list[onnx.ModelProto]
) -> None:
    size = len(values)
    text = (
        f"g (float[2,{size}] x, float[{size}] w) => (float[2,{size}] y) {{ i = Identity(x) y = {op}(i, w) }}"
    )
    source = weighted(graph(text), w=np.asarray(values, np.float32))
    apply(Simplify(), source)
    assert ("w" in {tensor.name for tensor in handed_over[0].graph.initializer}) == given


def test_small_constants_stay_and_chains_of_them_are_folded() -> None:
    values = {name: noise(3) for name in ("a", "b", "c")}
    source = weighted(
        graph("""
            g (float[2,3] x, float[3] a, float[3] b, float[3] c) => (float[2,3] y) {
                i = Identity(x) s = Add(a, b) p = Mul(i, s) y = Add(p, c)
            }"""),
        **values,
    )
    result, _ = apply(Simplify(), source)
    assert ops(result) == ["Mul", "Add"]
    feeds = random_feeds(source)
    np.testing.assert_array_equal(run(result, feeds)[0], run(source, feeds)[0])


def test_batch_normalization_is_folded_within_the_tolerance() -> None:
    source = weighted(
        graph("""g (float[1,8,9,9] x, float[16,8,3,3] w, float[16] s, float[16] b, float[16] m, float[16] v)
            => (float[1,16,7,7] y) { c = Conv(x, w) y = BatchNormalization(c, s, b, m, v) }"""),
        w=noise(16, 8, 3, 3),
        s=noise(16),
        b=noise(16, 1)[:, 0],
        m=noise(16, 1, 1)[:, 0, 0],
        v=np.abs(noise(16)) + np.float32(0.1),
    )
    result, report = apply(Simplify(), source)
    assert ops(result) == ["Conv"]
    assert report.changes
    feeds = random_feeds(source)
    ours, theirs = run(result, feeds)[0], run(source, feeds)[0]
    assert np.linalg.norm(ours - theirs) <= Simplify.exactness.tolerance * np.linalg.norm(theirs)


def test_every_optimizer_of_this_onnxsim_is_known() -> None:
    import onnxsim.onnxsim_cpp2py_export as library

    skipped = set(skipped_always())
    assert set(library._list_optimizers()) == OPTIMIZERS | (
        skipped - {"fuse_matmul_add_bias_into_gemm_batched"}
    )
    assert {"fuse_layer_norm", "fuse_gelu", "fuse_attention", "fuse_mul_into_conv"} <= skipped


def test_names_and_notes_survive() -> None:
    source = graph(
        "g (float[2,3] x) => (float[2,3] y) { [skip] i = Identity(x) [act] r = Relu(i) [out] y = Neg(r) }"
    )
    for node in source.proto.graph.node:
        node.metadata_props.add(key="scope", value="head")
    source.proto.metadata_props.add(key="author", value="someone")
    result, _ = apply(Simplify(), source)
    notes = {n.name: {p.key: p.value for p in n.metadata_props} for n in result.proto.graph.node}
    assert notes == {"act": {"scope": "head", TAG: "simplify"}, "out": {"scope": "head"}}
    assert [(p.key, p.value) for p in result.proto.metadata_props] == [("author", "someone")]


def test_plugins_are_kept_beside_folded_nodes() -> None:
    source = model(
        """<ir_version: 8, opset_import: ["" : 17, "vendor" : 2]>
        g (float[2,3] x) => (float[2,3] y) {
            i = Identity(x) p = MyPlugin<k = 3>(i) q = vendor.Other(p) r = Identity(q) y = Neg(r) }"""
    )
    result, report = apply(Simplify(), source)
    assert report.changes
    assert [(n.domain, n.op_type) for n in result.proto.graph.node] == [
        ("", "MyPlugin"),
        ("vendor", "Other"),
        ("", "Neg"),
    ]


def test_a_result_with_other_inputs_is_declined() -> None:
    source = graph(  # onnxsim 0.8.1 renames the input to the output's name
        """g (float[3] x) => (float[3] y) {
            s = SequenceConstruct(x, x) i = Constant<value_int = 0>() y = SequenceAt(s, i) }"""
    )
    result, report = apply(Simplify(), source)
    assert result.same_as(source)
    assert [r.reason for r in report.refusals] == ["onnxsim would change the model's inputs or outputs"]


def test_a_model_that_onnxsim_cannot_read_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    source = graph("g (float[3] x) => (float[3] y) { i = Identity(x) y = Relu(i) }")
    source.proto.graph.node[1].attribute.append(onnx.helper.make_attribute("nonsense", 1))
    step = Simplify()
    from rewriter.base import Context, Refusal

    (event,) = step.rewrite_model(source, Context())
    assert isinstance(event, Refusal)
    assert "nonsense" in event.reason


def test_the_terminal_stays_clean(capfd: pytest.CaptureFixture[str]) -> None:
    source = graph("g (float[2,3] x) => (float[2,3] y) { p = MyPlugin(x) i = Identity(p) y = Neg(i) }")
    apply(Simplify(), source)
    assert capfd.readouterr() == ("", "")


ATTENTION = """<ir_version: 10, opset_import: ["": 24, "local": 1]>
g (float[2,4,1,8] q, float[2,2,8,8] k, float[2,2,8,8] v, int64[2] valid) => (float[2,4,1,8] y) {
    y = local.Attention<is_causal = 1>(q, k, v, , , , valid) }"""
"""A step of decoding, with grouped heads and keys that are valid up to a length."""


def expanded_attention() -> Model:
    """`ATTENTION` as the 98 nodes that the standard defines it by."""
    proto = onnx.parser.parse_model(ATTENTION)
    types = {value.name: value.type.SerializeToString() for value in proto.graph.input}
    (node,) = proto.graph.node
    schema: Any = onnx.defs.get_schema("Attention", 24)
    body = schema.get_context_dependent_function(
        node.SerializeToString(), [types.get(name, b"") for name in node.input]
    )
    function = onnx.FunctionProto.FromString(body)
    function.domain = "local"
    proto.functions.append(function)
    return load(onnx.inliner.inline_local_functions(proto))


def test_further_rounds_simplify_what_one_run_of_onnxsim_leaves() -> None:
    once, report = apply(Simplify(), expanded_attention())
    assert report.changes
    twice, again = apply(Simplify(), once)
    assert not again.changes
    assert twice.same_as(once)


EXPANDED = """g (float[n] x, float[n,8] z) => (float[n,1] y) <int64[1] one = {{1}}> {{
    b = Shape<start = 0, end = 1>(z) t = Concat<axis = 0>(b, one) r = Reshape(x, t) e = Expand(r, {target})
    y = Neg(e) }}"""


@pytest.mark.parametrize(
    ("target", "kept"),
    [
        pytest.param("t", [], id="the target of the Reshape"),
        pytest.param("b", ["Expand"], id="another target"),
    ],
)
def test_an_expand_to_the_target_of_the_reshape_before_it_goes(target: str, kept: list[str]) -> None:
    source = graph(EXPANDED.format(target=target).replace("float[n,1] y", "float[n,k] y"))
    result, _ = apply(Simplify(), source)
    assert [op for op in ops(result) if op == "Expand"] == kept
    feeds = {"x": np.arange(4, dtype=np.float32), "z": np.zeros((4, 8), np.float32)}
    for before, after in zip(run(source, feeds), run(result, feeds), strict=True):
        assert np.array_equal(before, after)


SELECTION = """g (float[2,8] x) => (float[2,8] y)
    <bool yes = {1}, bool no = {0}, bool[2,1] some = {1, 0}, float zero = {0.0}, float[2,8] o = {ONES}> {
        a = Relu(x)
        b = Where(WHAT)
        y = Neg(b)
    }""".replace("ONES", ", ".join(["1.5"] * 16))


@pytest.mark.parametrize(
    ("what", "kept"),
    [
        pytest.param("yes, a, zero", [], id="always the first"),
        pytest.param("no, zero, a", [], id="always the second"),
        pytest.param("yes, zero, a", ["Where"], id="it would broadcast"),
        pytest.param("some, a, o", ["Where"], id="row by row"),
    ],
)
def test_a_where_with_a_constant_condition_goes(what: str, kept: list[str]) -> None:
    source = graph(SELECTION.replace("WHAT", what))
    result, _ = apply(Simplify(), source)
    assert [op for op in ops(result) if op == "Where"] == kept
    feeds = {"x": np.arange(16, dtype=np.float32).reshape(2, 8) - 8}
    assert np.array_equal(run(source, feeds)[0], run(result, feeds)[0])


def test_onnxsim_is_loaded_without_torch_and_sympy() -> None:
    """They cost 3 s of every run; whoever needs them later imports them as ever."""
    source = (
        "import sys; from rewriter.passes.simplify import skipped_always; skipped_always();"
        "print({'torch', 'sympy'} & sys.modules.keys()); import sympy; print(sympy.Integer(2))"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["set()", "2"]


def nested(depth: int) -> str:
    """Nodes that compute `o{depth}` of `x` in that many Ifs inside each other."""
    if not depth:
        return "o0 = Relu(x)"
    return f"""s{depth} = ReduceSum <keepdims = 0> (x)
        c{depth} = Greater(s{depth}, zero)
        o{depth} = If (c{depth}) <
            then_branch = t () => (float[4] o{depth - 1}) {{ {nested(depth - 1)} }},
            else_branch = e () => (float[4] n{depth}) {{ n{depth} = Neg(x) }}>"""


def test_ifs_as_deep_as_protobuf_reads_are_simplified_in_the_time_limit() -> None:
    """A release of onnxsim needed 500 s and 3.3 GB for 28 of them; beyond the limit it is ended."""
    source = graph(
        f"g (float[4] x) => (float[4] o28) <float zero = {{0.0}}> {{ {nested(28)} y = Identity(x) }}"
    )
    _, report = apply(Simplify(), source)
    assert not report.refusals
