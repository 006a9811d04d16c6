"""Operator families, and the functions of matching."""

from contextlib import suppress

import numpy as np
import onnx
import pytest
from graphs import graph, model
from onnx import helper
from tables import values

from rewriter.ir.graph import GraphEditor, is_op, open_graphs, ops
from rewriter.ir.graph.match import (
    operands,
    other_operand,
    walk_down,
    walk_up,
)
from rewriter.ir.graph.weights import NewWeights, gemm_obstacle, is_transposed, layout_obstacle
from rewriter.ir.model import Model

FAMILIES = {name: value for name, value in vars(ops).items() if isinstance(value, frozenset)}

NOT_IN_ONNX = {
    "SimplifiedLayerNormalization",
    *("DynamicQuantizeLSTM", "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "QAttention"),
}
"""Operators that only ONNX Runtime has."""


def editor(source: Model) -> GraphEditor:
    return open_graphs(source)[0]


CHAIN = """g (float[2,4] x, float[2,4] z) => (float[2,4] y, float[8] w)
<float half = {0.5}, int64[1] all = {-1}> {
    a = Mul(half, x) b = Sub(a, z) c = Identity(b) d = Neg(c) y = Clip(d, half) w = Reshape(y, all)
}"""


@pytest.mark.parametrize("name", FAMILIES)
def test_families_contain_only_operators_of_onnx(name: str) -> None:
    assert {op for op in FAMILIES[name] - NOT_IN_ONNX if not onnx.defs.has(op)} == set()


def test_disjoint_families_share_no_operator() -> None:
    assert ops.CHEAP.isdisjoint(ops.COMPUTE_BOUND)
    assert ops.VIEWS.isdisjoint(ops.ELEMENTWISE | ops.REDUCTIONS | ops.SOFTMAX)


def test_an_operator_of_another_domain_does_not_match() -> None:
    assert is_op(helper.make_node("Conv", ["x"], ["y"], domain="ai.onnx"), "Gemm", "Conv")
    assert not is_op(helper.make_node("Conv", ["x"], ["y"], domain="vendor"), "Conv")
    assert not is_op(None, "Conv")


@values
def test_operands(op: str, inputs: list[str], orders: list[tuple[str, str]]) -> None:
    assert list(operands(helper.make_node(op, inputs, ["y"]))) == orders


@values
def test_other_operand(inputs: list[str], other: str | None) -> None:
    assert other_operand(helper.make_node("Mul", inputs, ["y"]), "a") == other


def test_chains_of_single_consumers_and_of_producers() -> None:
    opened = editor(graph(CHAIN))
    nodes, end = walk_down(opened, "b", lambda node: is_op(node, "Identity", "Neg"))
    assert ([node.op_type for node in nodes], end) == (["Identity", "Neg"], "d")
    nodes, begin = walk_up(opened, "d", lambda node: is_op(node, "Identity", "Neg"))
    assert ([node.op_type for node in nodes], begin) == (["Neg", "Identity"], "b")


def test_a_block_that_raises_commits_nothing() -> None:
    source = model('<ir_version: 8, opset_import: ["" : 17]> g (float x) => (float y) { y = Abs(x) }')
    before = source.copy()
    opened = editor(source)
    with suppress(KeyError), opened:
        opened.replace_producer("y", opened.make("Neg", ["x"], ["y"]))
        opened.replace_producer("no such tensor")
    assert source.same_as(before)


GEMM = "g (float[3,2] x, float[2,2] m) => (float[3,2] y) <float[2,2] w = {1, 2, 3, 4}, float[2] b = {5, 6}>"


def test_a_changed_weight_is_created_once() -> None:
    source = graph(f"{GEMM} {{ y = Gemm(x, w, b) }}")
    editor = open_graphs(source)[0]
    weights = NewWeights(editor)
    name = weights.changed("w", "turned", np.transpose)
    assert weights.changed("w", "turned", np.transpose) == name == "w/turned"
    np.testing.assert_array_equal(editor.value(name), [[1, 3], [2, 4]])
    assert editor.value(name).flags["C_CONTIGUOUS"]


@values
def test_obstacles_of_a_gemm(call: str, reason: str | None) -> None:
    source = graph(f"{GEMM} {{ y = {call} }}".replace("float[3,2] y", "float[P,Q] y"))
    editor = open_graphs(source)[0]
    node = editor.nodes[0]
    assert gemm_obstacle(node) == reason
    assert is_transposed(node) == ("transB" in call)
    assert layout_obstacle(editor, "w") is None
