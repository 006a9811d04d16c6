"""Models that TensorRT parses although other libraries refuse them: mended, and reported."""

import math
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from command_lines import invoke
from graphs import graph, model, ops, random_feeds, run
from onnx_text import with_header
from tables import values

import rewriter
from rewriter.ir.model import DETACH_BYTES, load, walk_graphs
from rewriter.ir.model.graphs import rename_tensors
from rewriter.ir.model.normalization import lift_weights

TEXT = """
    g (float[2,3] x) => (float[2,3] y, float[2,3] z) {
        [same] a = Neg(x) [same] b = Exp(a) [same_1] c = Relu(b) [same] y = Sigmoid(c) z = Abs(c)
    }"""


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(with_header(text))


def names(graph: onnx.GraphProto) -> list[str]:
    return [node.name for node in graph.node]


def test_nodes_of_one_name_are_renamed_and_reported() -> None:
    model = load(parsed(TEXT))
    assert names(model.proto.graph) == ["same", "same_2", "same_1", "same_3", ""]
    assert model.notes == (
        "nodes had the name of another node, and were renamed: same -> same_2, same -> same_3",
    )
    assert load(model.whole()).notes == ()


def test_branches_have_names_of_their_own() -> None:
    model = load(
        parsed("""
        g (bool k, float[2] x) => (float[2] y) {
            [n] y = If (k) <then_branch = t () => (float[2] t) { [n] t = Neg(x) },
                            else_branch = e () => (float[2] e) { [n] f = Exp(x) [n] e = Abs(f) }>
        }""")
    )
    assert len(model.notes) == 1
    assert "n -> n_1" in model.notes[0]
    run(model, {**random_feeds(model), "k": np.array(True)})


def without(field: str, text: str = TEXT) -> onnx.ModelProto:
    """The model whose first output lacks its shape, or its type as a whole."""
    proto = parsed(text)
    value = proto.graph.output[0]
    (value.type.tensor_type if field == "shape" else value).ClearField(field)
    return proto


@pytest.mark.parametrize("field", ["shape", "type"])
def test_an_output_gets_the_shape_that_it_lacks(field: str) -> None:
    model = load(without(field))
    first, second = model.signature.outputs
    assert (first.dtype, first.shape) == (second.dtype, second.shape)
    assert model.notes[1:] == ("output 'y' has no shape in the file; by inference it is 2x3",)


def test_an_output_that_inference_does_not_know_stays_unknown() -> None:
    text = "g (float[2,3] x) => (float[2,3] y) { y = TheirPlugin(x) }"
    model = load(without("shape", text))
    assert model.signature.outputs[0].shape is None
    assert model.notes == ("output 'y' has no shape in the file, and inference finds none",)


@pytest.mark.parametrize("command", ["scan", "fix"])
def test_the_commands_report_it(command: str, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(without("shape").SerializeToString())
    more = ["--dry-run", "--engine", "emulation"] if command == "fix" else []
    outcome = invoke(command, path, *more)
    assert outcome.exit_code == 0, outcome.output
    text = " ".join(outcome.stdout.split())
    assert "were renamed: same -> same_2" in text
    assert "output 'y' has no shape in the file" in text


def test_the_fixed_model_runs(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(without("shape").SerializeToString())
    result = rewriter.fix(path, tmp_path / "f.onnx", engine="emulation")
    assert result.verdict is not None and result.verdict.passed
    onnx.checker.check_model(str(tmp_path / "f.onnx"))


UNSORTED = """
    g (bool k, float[2] x) => (float[2] y) {
        y = Abs(b)
        b = If (k) <then_branch = t () => (float[2] t) { t = Neg(f) f = Exp(a) },
                   else_branch = e () => (float[2] e) { e = Neg(x) }>
        a = Relu(x) c = Sin(x)
    }"""


def test_nodes_out_of_order_are_sorted_in_bodies_too() -> None:
    model = load(parsed(UNSORTED))
    assert model.notes == ("3 of 7 nodes came before a node whose result they read: sorted",)
    assert [n.op_type for n in model.proto.graph.node] == ["Relu", "If", "Abs", "Sin"]
    feeds = {"k": np.array(True), "x": np.array([1.0, -1.0], np.float32)}
    np.testing.assert_allclose(run(model, feeds)[0], np.exp([1.0, 0.0]), rtol=1e-6)
    assert load(model.whole()).notes == ()


def test_a_local_function_out_of_order_is_sorted() -> None:
    head, body = '<ir_version: 8, opset_import: ["" : 17, "own" : 1]>', "{ y = Neg(t) t = Exp(x) }"
    proto = onnx.parser.parse_model(
        f"{head} g (float[2] x) => (float[2] z) {{ z = own.F(x) }}"
        f'<opset_import: ["" : 17], domain: "own"> F (x) => (y) {body}'
    )
    model = load(proto)
    assert [n.op_type for n in model.proto.functions[0].node] == ["Exp", "Neg"]
    assert len(model.notes) == 1


@values
def test_a_cycle_is_refused(text: str) -> None:
    with pytest.raises(rewriter.RewriterError, match="computed from itself"):
        load(parsed(text))


ERFCS = """
    g (bool k, {t}[3] x) => ({t}[3] y, {t}[3] z) {{
        y = Erfc(x) a = Neg(y)
        z = If (k) <then_branch = t () => ({t}[3] t) {{ t = Erfc(a) }},
                   else_branch = e () => ({t}[3] e) {{ e = Abs(a) }}>
    }}"""


@pytest.mark.parametrize(("dtype", "rtol"), [("float", 1e-6), ("float16", 2e-3)])
def test_erfc_which_onnx_lacks_becomes_erf(dtype: str, rtol: float) -> None:
    model = load(parsed(ERFCS.format(t=dtype)))
    assert model.notes == ("ONNX has no Erfc: 2 nodes became 1 - Erf(x)",)
    assert ops(model) == ["Erf", "Sub", "Neg", "If"]
    x = np.array([-1.5, 0.25, 1.0], onnx.helper.tensor_dtype_to_np_dtype(model.signature.inputs[1].dtype))
    first, second = run(model, {"k": np.array(True), "x": x})
    expected = [math.erfc(value) for value in x]
    np.testing.assert_allclose(first, expected, rtol)
    np.testing.assert_allclose(second, [math.erfc(-value) for value in expected], rtol)


def test_an_erfc_of_the_models_own_functions_stays() -> None:
    head, call = '<ir_version: 8, opset_import: ["" : 17, "own" : 1]>', "{ y = own.Erfc(x) }"
    own = '<opset_import: ["" : 17], domain: "own"> Erfc (x) => (y) { y = Neg(x) }'
    model = load(onnx.parser.parse_model(f"{head} g (float[2] x) => (float[2] y) {call} {own}"))
    assert ops(model) == ["Erfc"]
    assert not model.notes


WEIGHT = "k = Constant<value = float[4] {4, 3, 2, 1}>()"

LIFTED = [
    pytest.param(f"{WEIGHT} y = Mul(x, k)", ["Mul"], {"k"}, id="a Constant"),
    pytest.param(f"{WEIGHT} i = Identity(k) y = Mul(x, i)", ["Mul"], {"k"}, id="an Identity of it"),
    pytest.param("i = Identity(w) j = Identity(i) y = Mul(x, j)", ["Mul"], {"w"}, id="Identity of a weight"),
]

STAYS = [
    pytest.param("k = Constant<value = float {2}>() y = Mul(x, k)", "float[4] y", id="a single number"),
    pytest.param(
        "k = Constant<value = int64[2] {2, 2}>() r = Reshape(x, k) y = Relu(r)", "float[2,2] y", id="a shape"
    ),
    pytest.param(f"{WEIGHT} y = Mul(x, k)", "float[4] y, float[4] k", id="a graph output"),
    pytest.param("i = Identity(x) y = Mul(i, w)", "float[4] y", id="an Identity of an input"),
]


def body(text: str, output: str = "float[4] y") -> str:
    return f"g (float[4] x) => ({output}) <float[4] w = {{1, 2, 3, 4}}> {{ {text} }}"


@pytest.mark.parametrize(("text", "left", "weights"), LIFTED)
def test_weights_become_initializers(text: str, left: list[str], weights: set[str]) -> None:
    source = graph(body(text))
    lift_weights(result := source.copy())
    assert ops(result) == left
    assert weights <= {t.name for t in result.proto.graph.initializer}
    feeds = random_feeds(source)
    assert np.array_equal(run(source, feeds)[0], run(result, feeds)[0])


@pytest.mark.parametrize(("text", "output"), STAYS)
def test_what_is_no_weight_stays(text: str, output: str) -> None:
    source = graph(body(text, output))
    lift_weights(result := source.copy())
    assert result.same_as(source)


def test_large_weights_are_detached() -> None:
    size = DETACH_BYTES // 4
    values = ", ".join("1" for _ in range(size))
    source = graph(
        f"g (float[{size}] x) => (float[{size}] y) {{"
        f" k = Constant<value = float[{size}] {{{values}}}>() y = Mul(x, k) }}"
    )
    assert not source.weights
    lift_weights(source)
    assert source.weights["k"].shape == (size,)


def test_weights_of_branches_become_their_own() -> None:
    source = model(f"""
        <ir_version: 8, opset_import: ["" : 17]>
        g (bool c, float[4] x) => (float[4] y) <float[4] w = {{1, 2, 3, 4}}> {{
            o = Identity(w)
            y = If (c) <
                then_branch = yes () => (float[4] t) {{ {WEIGHT} t = Mul(x, k) }},
                else_branch = no () => (float[4] e) {{ e = Mul(x, o) }}
            >
        }}""")
    lift_weights(result := source.copy())
    names = [[t.name for t in g.initializer] for g in walk_graphs(result.proto.graph)]
    assert names == [["w"], ["k"], []]
    for condition in (True, False):
        feeds = random_feeds(source) | {"c": np.array(condition)}
        assert np.array_equal(run(source, feeds)[0], run(result, feeds)[0])


def test_names_swap_and_those_of_a_subgraph_stay() -> None:
    proto = parsed("""
        g (bool c, float[2] a, float[2] b) => (float[2] y) {
            y = If <then_branch = t () => (float[2] p) { d = Abs(a) p = Sub(d, b) },
                    else_branch = e () => (float[2] b) { b = Neg(a) }> (c) }""")
    (node,) = proto.graph.node
    rename_tensors(node, {"a": "b", "b": "a", "d": "w", "y": "z"})
    then, other = (attribute.g for attribute in node.attribute)
    assert [*node.input, *node.output] == ["c", "z"]
    assert [(*n.input, *n.output) for n in then.node] == [("b", "d"), ("d", "a", "p")]
    assert [(*n.input, *n.output) for n in other.node] == [("b", "b")] and other.output[0].name == "b"
