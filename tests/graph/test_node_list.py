"""Texts of nodes with calls and numbers as operands."""

import pytest

from rewriter.ir.graph.node_list import spelled_out


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("y = Relu (x)", "y = Relu (x)", id="nothing to spell out"),
        pytest.param(
            "y = Abs (Neg (x))  z = Relu (y)",
            "nested_0 = Neg (x) y = Abs (nested_0) z = Relu (y)",
            id="a call",
        ),
        pytest.param(
            "a, b = Split <axis = 0> (x, [1, -1])",
            "number_0 = Constant <value = int64[2] {1, -1}> () a, b = Split <axis = 0> (x, number_0)",
            id="a list",
        ),
        pytest.param(
            "f (x) => (y) { y = Max (x, 1.5) }",
            "f (x) => (y) { number_0 = Constant <value = float {1.5}> () y = Max (x, number_0) }",
            id="a function's number",
        ),
        pytest.param("step (seq(float[]) s) => (z) {}", "step (seq (float[]) s) => (z) { }", id="a header"),
    ],
)
def test_operands_become_nodes(text: str, expected: str) -> None:
    assert spelled_out(text).replace("{}", "{ }").split() == expected.split()
