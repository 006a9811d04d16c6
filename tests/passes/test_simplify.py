"""simplify: correct folding, nodes that must stay, and a silent terminal."""

from typing import Any

import numpy as np
import onnx
import onnx.inliner
import pytest
from command_lines import python
from graphs import apply, graph, ops, random_feeds, run, with_weights

from rewriter.ir.graph import TAG
from rewriter.ir.model import Model, load
from rewriter.passes.simplify import OPTIMIZERS, Simplify, _adopt, skipped_always


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def test_weights_that_stay_keep_their_arrays() -> None:
    source = with_weights(
        "g (float[2,30] x, float[30,40] w, float[30,40] v) => (float[2,40] y) "
        "{ i = Identity(x) m = MatMul(i, w) t = Neg(v) n = MatMul(i, t) y = Add(m, n) }",
        {"w": noise(30, 40), "v": noise(30, 40)},
    )
    result, _ = apply(Simplify(), source)
    assert ops(result) == ["MatMul", "MatMul", "Add"]
    assert result.weights["w"] is source.weights["w"] and "v" not in result.weights
    np.testing.assert_array_equal(result.weights["t"], -source.weights["v"])
    feeds = random_feeds(source)
    np.testing.assert_array_equal(run(result, feeds)[0], run(source, feeds)[0])


def test_a_large_constant_of_onnxsim_is_stored_as_a_weight() -> None:
    """As a node its data would be copied by every pass: onnxsim leaves 100 MB of them in an MViT."""
    source, folded = graph("g (float[512] x) => (float[512] y) { a = Neg(x) y = Neg(a) }"), noise(512)
    result = graph("g (float[512] x) => (float[512] y) { a = Neg(x) y = Mul(x, a) }")
    constant = onnx.helper.make_node("Constant", [], ["a"], value=onnx.numpy_helper.from_array(folded))
    result.proto.graph.node[0].CopyFrom(constant)
    assert _adopt(source, result.proto, "simplify") and ops(source) == ["Mul"]
    np.testing.assert_array_equal(source.weights["a"], folded)


@pytest.fixture
def handed_over(monkeypatch: pytest.MonkeyPatch) -> list[tuple[onnx.ModelProto, dict[str, object]]]:
    """What onnxsim is given from now on, with its options."""
    import onnxsim

    simplify, seen = onnxsim.simplify, []

    def spy(proto: onnx.ModelProto, **options: object) -> tuple[onnx.ModelProto, bool]:
        seen.append((proto, options))
        return simplify(proto, **options)  # type: ignore[no-any-return]

    monkeypatch.setattr(onnxsim, "simplify", spy)
    monkeypatch.setattr("rewriter.base.sandbox.inside", True)  # no child, whose calls the spy would not see
    return seen


def test_weights_of_no_chain_stay_here(
    handed_over: list[tuple[onnx.ModelProto, dict[str, object]]],
) -> None:
    text = "g (float[2,30] x, float[30,40] w) => (float[2,40] y) { i = Identity(x) y = MatMul(i, w) }"
    source = with_weights(text, {"w": noise(30, 40)})
    apply(Simplify(), source)
    assert handed_over
    assert max(proto.ByteSize() for proto, _ in handed_over) < source.weights["w"].nbytes
    assert all(options["skip_constant_folding"] for _, options in handed_over)


def test_batch_normalization_is_folded_within_the_tolerance() -> None:
    b, m, v = noise(16, 1)[:, 0], noise(16, 1, 1)[:, 0, 0], np.abs(noise(16)) + np.float32(0.1)
    source = with_weights(
        """g (float[1,8,9,9] x, float[16,8,3,3] w, float[16] s, float[16] b, float[16] m, float[16] v)
            => (float[1,16,7,7] y) { c = Conv(x, w) y = BatchNormalization(c, s, b, m, v) }""",
        {"w": noise(16, 8, 3, 3), "s": noise(16), "b": b, "m": m, "v": v},
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


def test_a_model_that_onnxsim_cannot_read_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    source = graph("g (float[3] x) => (float[3] y) { i = Identity(x) y = Relu(i) }")
    source.proto.graph.node[1].attribute.append(onnx.helper.make_attribute("nonsense", 1))
    source.mark_edited()
    step = Simplify()
    from rewriter.passes.base import Context, Refusal

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


def test_onnxsim_is_loaded_without_torch_and_sympy() -> None:
    """They cost 3 s of every run; whoever needs them later imports them as ever."""
    source = (
        "import sys; from rewriter.passes.simplify import skipped_always; skipped_always();"
        "print({'torch', 'sympy'} & sys.modules.keys()); import sympy; print(sympy.Integer(2))"
    )
    done = python("-c", source)
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
