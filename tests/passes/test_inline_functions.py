"""inline-functions: inlined bodies with equal results, and refusals with their reasons."""

import numpy as np
from graphs import apply, model, with_weights

from rewriter.ir.graph import TAG
from rewriter.passes.inline_functions import InlineFunctions

GATE = """
    <domain: "local", opset_import: ["" : 17]>
    gate (a) => (b) {
        [sigmoid] s = Sigmoid(a) [product] b = Mul(a, s)
    }"""

HEADER = '<ir_version: 8, opset_import: ["" : 17, "local" : 1]>'


def test_weights_stay_the_same_arrays() -> None:
    body = "{ h = local.gate(x) y = MatMul(h, w) }"
    text = f"{HEADER} g (float[2,3] x, float[3,400] w) => (float[2,400] y) {body} {GATE}"
    source = with_weights(text, {"w": np.ones((3, 400), np.float32)})
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
