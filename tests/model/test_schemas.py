"""Float types in schemas, and the exceptions that schemas do not contain."""

import pytest
from onnx import NodeProto, TensorProto, helper

from rewriter.ir.model.graphs import schema_of
from rewriter.ir.model.schemas import TypeRule, set_type_attributes, type_rules

FP16, BF16, FP32 = TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT
F, S, A = TypeRule.FOLLOWS, TypeRule.FP32, TypeRule.ANY


def node(op: str, inputs: str = "x", outputs: str = "y", domain: str = "", **attributes: int) -> NodeProto:
    made = helper.make_node(op, inputs.split(), outputs.split(), domain=domain)
    made.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
    return made


@pytest.mark.parametrize(
    ("made", "opset", "low", "inputs", "outputs"),
    [
        pytest.param(node("Add", "a b"), 17, FP16, (F, F), (F,), id="Add follows"),
        pytest.param(node("Concat", "a b c", axis=0), 17, FP16, (F, F, F), (F,), id="a variadic input"),
        pytest.param(node("Conv", "x w"), 17, BF16, (S, S), (S,), id="Conv has no BF16 below 22"),
        pytest.param(node("Conv", "x w"), 22, BF16, (F, F), (F,), id="Conv has BF16 from 22 on"),
        pytest.param(node("Range", "a b c"), 17, FP16, (S, S, S), (S,), id="Range has no FP16"),
        pytest.param(node("NonMaxSuppression", "b s"), 17, FP16, (S, S), (S,), id="boxes are FP32 by schema"),
        pytest.param(node("Resize", "x r s"), 17, FP16, (F, S, S), (F,), id="roi and scales of Resize"),
        pytest.param(node("Upsample", "x s"), 9, FP16, (F, S), (F,), id="scales of Upsample"),
        pytest.param(node("Gather", "x i"), 17, FP16, (F, S), (F,), id="indices are not floats"),
        pytest.param(node("Shape"), 17, FP16, (A,), (S,), id="Shape reads any type"),
        pytest.param(node("IsInf"), 17, FP16, (S,), (S,), id="IsInf has no FP16 below 20"),
        pytest.param(node("IsInf"), 17, FP32, (S,), (S,), id="IsInf below 20, in an FP32 island"),
        pytest.param(node("IsInf"), 20, FP16, (A,), (S,), id="IsInf reads any type from 20 on"),
        pytest.param(node("Cast", to=FP32), 17, FP16, (A,), (F,), id="Cast reads any type"),
        pytest.param(node("CastLike", "x l"), 17, FP16, (A, F), (F,), id="CastLike reads any type"),
        pytest.param(node("RandomNormal", "", dtype=10), 17, FP16, (), (S,), id="RandomNormal is FP32"),
        pytest.param(node("RandomNormalLike"), 17, FP16, (F,), (F,), id="RandomNormalLike inherits"),
        pytest.param(node("RandomNormalLike", dtype=1), 17, FP16, (F,), (S,), id="RandomNormalLike"),
        pytest.param(node("LayerNormalization", "x s", "y m v"), 17, BF16, (F, F), (F, S, S), id="FP32"),
        pytest.param(node("QuantizeLinear", "x s"), 17, FP16, (S, S), (S,), id="Q is FP32 below 19"),
        pytest.param(node("QuantizeLinear", "x s"), 19, FP16, (F, F), (S,), id="Q has FP16 from 19 on"),
        pytest.param(node("DequantizeLinear", "q s"), 19, FP16, (S, F), (F,), id="DQ has FP16 from 19 on"),
        pytest.param(node("If"), 13, BF16, (S,), (S,), id="If has no BF16 below 16"),
        pytest.param(node("Exp", domain="ai.onnx"), 17, FP16, (F,), (F,), id="the long name of the domain"),
        pytest.param(node("Add", "a b"), 17, FP32, (F, F), (F,), id="everything may be FP32"),
    ],
)
def test_ports_follow_the_type_or_stay(
    made: NodeProto, opset: int, low: int, inputs: tuple[TypeRule, ...], outputs: tuple[TypeRule, ...]
) -> None:
    found = type_rules(made, {"": opset}, low)
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
