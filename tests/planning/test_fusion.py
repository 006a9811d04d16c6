"""What a Conv sums, and which nodes one kernel computes, where a plan is made before types are known."""

from typing import Any

import graphs
import pytest
from onnx import NodeProto, helper

from rewriter.ir.float_graph import FloatGraph
from rewriter.target.fusion import conv_depth, elementwise_after


@pytest.mark.parametrize(
    ("op", "weight", "attributes", "depth"),
    [
        pytest.param("Conv", (8, 6, 3, 5), {}, 90, id="Conv: channels of a group times the window"),
        pytest.param("Conv", (8, 6, 3, 5), {"group": 2, "strides": [2, 2]}, 90, id="whatever its stride"),
        pytest.param("Conv", (), {}, 1, id="Conv of unknown weight"),
        pytest.param("ConvTranspose", (6, 8, 4, 4), {}, 96, id="ConvTranspose"),
        pytest.param("ConvTranspose", (6, 8, 4, 4), {"group": 3}, 32, id="groups read a part each"),
        pytest.param("ConvTranspose", (6, 8, 4, 4), {"strides": [2, 2]}, 24, id="windows overlap less"),
        pytest.param("ConvTranspose", (6, 8, 4, 4), {"strides": [2, 1]}, 48, id="along one axis"),
        pytest.param("ConvTranspose", (6, 8, 4, 4), {"strides": [0, 0]}, 96, id="a stride of nothing"),
        pytest.param("ConvTranspose", (2, 8, 1, 1), {"strides": [4, 4]}, 1, id="at least one product"),
        pytest.param("ConvTranspose", (), {}, 1, id="ConvTranspose of unknown weight"),
    ],
)
def test_products_of_a_conv(op: str, weight: tuple[int, ...], attributes: dict[str, Any], depth: int) -> None:
    assert conv_depth(helper.make_node(op, ["x", "w"], ["y"], **attributes), weight) == depth


WEIGHTS = "<float[4,4] w = {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16}, float k = {0.5}>"


def _neg(node: NodeProto) -> bool:
    return node.op_type == "Neg"


@pytest.mark.parametrize(
    ("body", "nodes"),
    [
        pytest.param("b = Mul(a, k) c = Relu(b) y = MatMul(c, w)", "b c", id="a chain"),
        pytest.param("b = Mul(a, k) c = Add(a, b) y = MatMul(c, w)", "b c", id="both operands are inside"),
        pytest.param("b = Mul(a, x) y = MatMul(b, w)", "", id="an operand from outside"),
        pytest.param("b = Relu(a) c = Add(b, x) y = MatMul(c, w)", "b", id="it ends where one comes in"),
        pytest.param("b = Relu(a) c = MatMul(a, w) y = Add(b, c)", "", id="another reader"),
        pytest.param("b = Relu(a) c = Neg(b) y = Sqrt(c)", "b", id="it ends at the stop"),
        pytest.param("b = Neg(a) y = Sqrt(b)", "", id="it stops at once"),
        pytest.param("b = Relu(a) y = Softmax(b)", "b", id="a Softmax is none of them"),
    ],
)
def test_elementwise_nodes_after_a_tensor(body: str, nodes: str) -> None:
    source = graphs.graph(f"g (float[4,4] x) => (float[4,4] y) {WEIGHTS} {{ a = MatMul(x, w) {body} }}")
    found = elementwise_after(FloatGraph.main(source), "a", _neg)
    assert " ".join(node.output[0] for node in found) == nodes


def test_nothing_is_after_an_output() -> None:
    text = f"g (float[4,4] x) => (float[4,4] a, float[4,4] y) {WEIGHTS} {{ a = MatMul(x, w) y = Relu(a) }}"
    assert elementwise_after(FloatGraph.main(graphs.graph(text)), "a") == []
