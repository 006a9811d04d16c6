"""Float types in schemas, and the exceptions that schemas do not contain."""

import graphs
import onnx.parser
import pytest
from onnx import NodeProto, TensorProto, helper

from rewriter.ir.model.graphs import schema_of
from rewriter.ir.model.schemas import TypeRule, set_type_attributes, type_rules

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
