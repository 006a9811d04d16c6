"""inline-functions: inlined bodies with equal results, and refusals with their reasons."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from graphs import apply, model

from rewriter.ir.base import Refusal
from rewriter.ir.graph import TAG
from rewriter.passes.inline_functions import InlineFunctions, inline

GATE = """
    <domain: "local", opset_import: ["" : 17]>
    gate (a) => (b) {
        [sigmoid] s = Sigmoid(a)
        [product] b = Mul(a, s)
    }"""

NESTED = """
    <domain: "local", opset_import: ["" : 17, "local" : 1]>
    twice (a) => (c) {
        b = local.gate(a)
        c = local.gate(b)
    }"""

HEADER = '<ir_version: 8, opset_import: ["" : 17, "local" : 1]>'


def test_weights_stay_the_same_arrays() -> None:
    source = model(
        f"{HEADER} g (float[2,3] x, float[3,400] w) => (float[2,400] y) "
        f"{{ h = local.gate(x) y = MatMul(h, w) }} {GATE}"
    )
    weight = np.ones((3, 400), np.float32)
    del source.proto.graph.input[1]
    source.proto.graph.initializer.append(source.detached_tensor("w", weight))
    result, _ = apply(InlineFunctions(), source)
    assert result.weights["w"] is source.weights["w"]
    assert [i.name for i in result.proto.graph.input] == ["x"]
    assert len(result.proto.graph.initializer) == 1


def test_new_nodes_are_tagged_and_old_ones_are_not() -> None:
    source = model(
        f"{HEADER} g (float[2,3] x) => (float[2,3] y) {{ [mine] h = Relu(x) y = local.gate(h) }} {GATE}"
    )
    result, _ = apply(InlineFunctions(), source)
    tags = {n.op_type: [p.value for p in n.metadata_props if p.key == TAG] for n in result.proto.graph.node}
    assert tags == {"Relu": [], "Sigmoid": ["inline-functions"], "Mul": ["inline-functions"]}


@pytest.mark.parametrize(
    ("functions", "names"),
    [
        pytest.param(
            NESTED.replace("local.gate(a)", "local.twice(a)") + GATE,
            ["twice"],
            id="a function that calls itself",
        ),
        pytest.param(
            NESTED + GATE.replace('"" : 17', '"" : 17, "local" : 1').replace("Sigmoid(a)", "local.twice(a)"),
            ["gate", "twice"],
            id="two functions that call each other",
        ),
    ],
)
def test_endless_recursion_is_declined(functions: str, names: list[str]) -> None:
    source = model(f"{HEADER} g (float[2,3] x) => (float[2,3] y) {{ y = Relu(x) }} {GATE}")
    text = f"{HEADER} g (float[2,3] x) => (float[2,3] y) {{ y = local.twice(x) }} {functions}"
    source.proto.CopyFrom(onnx.parser.parse_model(text))  # onnx.checker itself does not come back from this
    before = source.copy()
    events = inline(source, "inline-functions")
    assert sorted(e.node for e in events if isinstance(e, Refusal)) == names
    assert source.same_as(before)


def test_a_function_of_another_opset_is_declined_by_name() -> None:
    source = model(f"{HEADER} g (float[2,3] x) => (float[2,3] y) {{ y = local.gate(x) }} {GATE}")
    source.proto.functions[0].opset_import[0].version = 12  # onnx.checker refuses such a file at load
    before = source.copy()
    (event,) = inline(source, "inline-functions")
    assert isinstance(event, Refusal)
    assert event.node == "gate"
    assert "sigmoid is written for opset 12, the model for 17" in event.reason
    assert source.same_as(before)
