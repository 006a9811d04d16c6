"""Facts: element types and shapes of every scope."""

import graphs
import numpy as np
import onnx.parser
import pytest
from graphs import cases, graph, weighted
from onnx import NodeProto, TensorProto, helper

from rewriter.base.errors import ModelError
from rewriter.ir.graph import open_graphs
from rewriter.ir.model import Model
from rewriter.ir.model.graphs import schema_of
from rewriter.ir.model.schemas import TypeRule, set_type_attributes, type_rules
from rewriter.ir.model.tensors import TensorFacts


def written(facts: TensorFacts | None) -> str:
    """Type and shape as onnx.parser writes them; [?] is an unknown rank."""
    if facts is None:
        return "unknown"
    kind = TensorProto.DataType.Name(facts.dtype).lower()
    return kind + (
        "[?]" if facts.shape is None else f"[{','.join(map(str, facts.shape))}]" if facts.shape else ""
    )


@pytest.mark.parametrize(("text", "expected"), cases("model/facts.txt"))
def test_types_and_shapes(text: str, expected: str) -> None:
    known = graph(text).facts().main
    names = [pair.partition("=")[0] for pair in expected.split()]
    assert " ".join(f"{name}={written(known.get(name))}" for name in names) == expected


def test_a_detached_weight_has_facts_like_any_other() -> None:
    source = _big_weight()
    assert source.weights
    known = source.facts().main
    assert known["w"] == TensorFacts(TensorProto.FLOAT, (64, 64))
    assert known["y"] == TensorFacts(TensorProto.FLOAT, (2, 64))


def test_sibling_branches_may_share_a_tensor_name() -> None:
    source = graph(
        """
        g (float[4] x, bool c) => (float[4] y) {
            y = If (c) <
                then_branch = t () => (float[4] u) { a = Cast<to = 10>(x) u = Cast<to = 1>(a) },
                else_branch = e () => (float[4] v) { a = Cast<to = 11>(x) v = Cast<to = 1>(a) }
            >
        }"""
    )
    known = source.facts()
    assert len(known.scopes) == 3
    assert known.main is known.scopes[0] and "a" not in known.main
    assert [scope["a"].dtype for scope in known.scopes[1:]] == [TensorProto.FLOAT16, TensorProto.DOUBLE]


def test_strict_inference_names_the_contradicting_node() -> None:
    source = graph("g (float[2,3] x, float[4,5] w) => (float[2,5] y) { y = MatMul(x, w) }")
    with pytest.raises(ModelError, match=r"types or shapes contradict each other: .*MatMul"):
        source.facts(strict=True)
    assert source.facts().main["y"].shape == (2, 5)


def test_inference_does_not_change_the_model() -> None:
    source = _big_weight()
    untouched = source.copy()
    source.facts(strict=True)
    assert source.same_as(untouched)


def _big_weight() -> Model:
    return weighted("g (float[2,64] x) => (float[2,64] y) { y = MatMul(x, w) }", w=(64, 64))


def test_facts_of_a_graph_are_kept_and_no_caller_changes_those_of_another() -> None:
    source = graph("g (float[2,3] x) => (float[2,3] y) { h = Relu(x)  y = Tanh(h) }")
    assert open_graphs(source)[0].tensor("new", "h") == "new"
    assert "new" not in source.facts().main
    source.proto.graph.node[0].op_type = "Transpose"
    source.mark_edited()
    assert source.facts().main["h"].shape == (3, 2)
    source.proto.graph.input[0].type.tensor_type.elem_type = 10
    source.mark_edited()
    assert source.facts().main["h"].dtype == 10


def test_facts_at_the_sizes_of_a_sample_follow_them_through_the_graph() -> None:
    source = graph("g (float[batch,3,height,width] x) => (float[batch,n] y) { f = Flatten(x)  y = Relu(f) }")
    before = source.proto.SerializeToString()
    found = source.at_sizes({"x": np.zeros((2, 3, 4, 5), np.float32)}).facts().main
    assert (found["f"].shape, found["y"].shape) == ((2, 60), (2, 60))
    assert source.proto.SerializeToString() == before
    assert source.at_sizes({}).facts().main["x"].shape == ("batch", 3, "height", "width")


def test_an_stft_without_onesided_has_half_of_the_frequencies() -> None:
    model = graph(
        "g (float[1,1000,1] x) => (float[1,f,b,2] y) <int64 step = {160}, int64 length = {400}>"
        " { y = STFT(x, step, , length) }"
    )
    assert model.facts().main["y"].sizes == (1, 4, 201, 2)
    assert not model.proto.graph.node[0].attribute


FP16, BF16, FP32 = TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT
TYPES = {"fp16": FP16, "bf16": BF16, "fp32": FP32}


def node(op: str, inputs: str = "x", outputs: str = "y", domain: str = "", **attributes: int) -> NodeProto:
    made = helper.make_node(op, inputs.split(), outputs.split(), domain=domain)
    made.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
    return made


@pytest.mark.parametrize(("text", "words", "expected"), graphs.cases("model/ports.txt"))
def test_ports_follow_the_type_or_stay(text: str, words: str, expected: str) -> None:
    opset, low = words.split()
    found = type_rules(onnx.parser.parse_node(text), {"": int(opset)}, TYPES[low])
    rules = {"F": TypeRule.FOLLOWS, "S": TypeRule.FP32, "A": TypeRule.ANY}
    inputs, outputs = (tuple(rules[word] for word in side.split()) for side in expected.split("->"))
    assert found is not None and (found.inputs, found.outputs) == (inputs, outputs)


@pytest.mark.parametrize(
    ("made", "opset"),
    [
        pytest.param(node("Plugin", domain="vendor"), 1, id="an unknown domain"),
        pytest.param(node("EfficientNMS_TRT"), 17, id="a plugin in the default domain"),
        pytest.param(node("LayerNormalization"), 16, id="an operator before its first version"),
    ],
)
def test_ports_without_a_schema_are_none(made: NodeProto, opset: int) -> None:
    assert schema_of(made.op_type, made.domain, opset) is None
    assert type_rules(made, {"": opset}, FP16) is None


def test_nodes_that_can_follow_a_type() -> None:
    follows = {op: type_rules(node(op), {"": 17}, FP16) for op in ("Relu", "NonMaxSuppression", "Shape")}
    assert {op: p is not None and p.can_follow for op, p in follows.items()} == {
        "Relu": True,
        "NonMaxSuppression": False,
        "Shape": False,
    }


@pytest.mark.parametrize(
    ("made", "dtype", "name", "expected"),
    [
        pytest.param(node("Cast", to=FP32), FP16, "to", FP16, id="Cast to a float"),
        pytest.param(node("Cast", to=TensorProto.INT64), FP16, "to", TensorProto.INT64, id="to an integer"),
        pytest.param(node("Cast", to=TensorProto.DOUBLE), FP16, "to", TensorProto.DOUBLE, id="to double"),
        pytest.param(node("RandomUniform", "", dtype=FP16), FP32, "dtype", FP32, id="RandomUniform"),
        pytest.param(node("HannWindow", output_datatype=FP16), FP32, "output_datatype", FP32, id="a window"),
        pytest.param(node("ArgMax", axis=1), FP16, "axis", 1, id="an attribute that is not a type"),
        pytest.param(
            node("LayerNormalization", "x s", "y m", stash_type=16), FP16, "stash_type", FP32, id="statistics"
        ),
        pytest.param(
            node("LayerNormalization", "x s", "y", stash_type=16), FP16, "stash_type", 16, id="no statistics"
        ),
    ],
)
def test_attributes_that_name_a_type_follow_it(made: NodeProto, dtype: int, name: str, expected: int) -> None:
    set_type_attributes(made, dtype)
    assert {item.name: item.i for item in made.attribute}[name] == expected
